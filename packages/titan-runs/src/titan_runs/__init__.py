"""Reads and follows the files of runs, and trains recipes in child processes. Imports no torch."""
