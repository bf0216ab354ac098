"""Imports TorchTitan's recipes."""
