"""`titan checkpoint ...`, and the command that resumes a run."""
