"""`titan checkpoint ...`, `titan run branch`, and the command that resumes a run."""
