"""Health checks of this machine: software, GPUs, memory and limits, network. ``titan doctor`` prints them."""
