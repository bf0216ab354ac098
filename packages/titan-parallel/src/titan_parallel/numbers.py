"""Arithmetic for error messages."""

from __future__ import annotations


def divisors(number: int) -> str:
    """Return all divisors of ``number``, separated by commas."""
    return ", ".join(str(candidate) for candidate in range(1, number + 1) if number % candidate == 0)
