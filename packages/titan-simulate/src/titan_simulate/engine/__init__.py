"""One rank of a job, run on fake tensors in a process of its own."""
