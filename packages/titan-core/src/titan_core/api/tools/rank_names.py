"""Rank numbers in messages. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable


def ranks(numbers: Iterable[int]) -> str:
    """Return ``rank 1``, or ``ranks 0-2, 5``."""
    numbers = sorted(set(numbers))
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {spans(numbers)}"


def spans(numbers: Iterable[int]) -> str:
    """Return ``0-2, 5``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
