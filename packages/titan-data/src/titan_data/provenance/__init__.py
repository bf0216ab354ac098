"""Provenance: the documents of each step, from the records of a run and its data alone."""
