"""Which documents a run has used in which step, from what the run has recorded and its data alone."""
