"""Helpers that the tests share: a pool of gloo processes, jobs to run in them, models, datasets and fake distributions."""

PATIENCE = 660.0
"""Seconds after which a test that waits for something fails. They only end a wait for what will never come: a test that
passes never waits for them, however busy the machine is. More than the ranks of a job wait for each other (600 s):
their errors say more."""
