"""Helpers that the tests share: a pool of gloo processes, jobs to run in them, models, datasets and fake distributions."""
