"""Machines: what a device and the links between devices can do, as small TOML files."""
