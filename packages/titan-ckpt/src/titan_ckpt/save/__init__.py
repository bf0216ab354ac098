"""Saving a run, now or in the background, and which checkpoints are kept."""
