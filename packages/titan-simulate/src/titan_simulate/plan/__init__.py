"""Search for the fastest way to run a recipe on a number of devices."""
