"""Tools for runs: read a run's directory during and after training, and train recipes in child processes."""
