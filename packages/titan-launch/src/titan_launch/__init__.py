"""Starts the ranks of a job: the options of `titan train` for more than one process."""
