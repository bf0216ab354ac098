"""Runs from outside: reads the directory of a run, while it trains and afterwards, and trains recipes in child processes."""
