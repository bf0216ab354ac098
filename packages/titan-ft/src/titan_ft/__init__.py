"""Per-step fault tolerance of data-parallel replica groups, with torchft."""
