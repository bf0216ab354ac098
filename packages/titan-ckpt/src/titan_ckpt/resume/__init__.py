"""Resuming a run: selecting a checkpoint, comparing it with the job, and loading it."""
