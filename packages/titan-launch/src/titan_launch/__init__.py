"""Starts the ranks of a job: the options of `titan train` that need more than one process."""
