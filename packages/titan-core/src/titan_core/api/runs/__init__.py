"""Run directories: the names of their files, write access to them, and files with one JSON object per line."""
