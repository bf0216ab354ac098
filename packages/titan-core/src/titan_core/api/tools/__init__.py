"""Functions that several plugins need, and that decide nothing about a job."""
