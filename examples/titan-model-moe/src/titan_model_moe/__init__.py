"""A small mixture-of-experts decoder."""
