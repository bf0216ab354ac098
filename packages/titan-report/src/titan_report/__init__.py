"""Reports, live views and comparisons of runs; the TensorBoard and Weights & Biases loggers."""
