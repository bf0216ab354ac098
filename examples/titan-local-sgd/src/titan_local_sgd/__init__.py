"""Local SGD as in DiLoCo."""
