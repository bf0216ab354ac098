"""What a checkpoint contains: tensors, and the state of optimizer, schedule, generators, data and observers."""
