"""Local SGD, as DiLoCo does it."""
