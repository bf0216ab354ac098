"""Completion in shells and editors."""
