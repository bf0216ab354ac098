"""Run directories, written and read in one place."""
