"""Run directories: their files, who may write to them, and reading them while a job runs and afterwards."""
