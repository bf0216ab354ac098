"""The ranks of this machine: their processes, what they print, and what each does for its launcher."""
