"""Small arithmetic for messages."""

from __future__ import annotations


def divisors(number: int) -> str:
    """All divisors of ``number``, for a message."""
    return ", ".join(str(candidate) for candidate in range(1, number + 1) if number % candidate == 0)
