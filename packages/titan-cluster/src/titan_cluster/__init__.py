"""Starts jobs on clusters: ``titan launch slurm|kubernetes|skypilot``."""
