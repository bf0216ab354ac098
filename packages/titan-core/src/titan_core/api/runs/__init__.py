"""Run directories: their files, write access to them, and reading them during and after a job."""
