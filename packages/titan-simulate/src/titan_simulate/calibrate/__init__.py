"""Measures the rates of this machine and writes them as the description of a machine."""
