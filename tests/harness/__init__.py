"""What the tests share: living gloo processes, jobs to run in them, and made-up distributions."""
