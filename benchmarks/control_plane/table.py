"""Costs of the control plane's parts, as a table by number of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Cost:
    """What one rank spends on one part."""

    seconds: float = 0.0
    """CPU time."""
    messages: int = 0
    """Messages sent and received."""
    num_bytes: int = 0
    """Payload sent and received."""
    descriptors: int = 0
    """Sockets that the part opens and that stay open."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the CPU time of this thread within the block."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - started


@dataclass(frozen=True)
class Row:
    """The cost of one part at one number of ranks."""

    part: str
    ranks: int
    first: Cost
    """Of rank 0."""
    other: Cost
    """Of another rank."""


HEADER = (
    "| part | ranks | CPU s, rank 0 | other | messages, rank 0 | other | MB, rank 0 | other | descriptors, rank 0 | other |",
    "| --- |" + " ---: |" * 9,
)


def line(row: Row) -> str:
    """Return the row as a line of Markdown."""
    first, other = row.first, row.other
    cells = [f"{cost.seconds:.3f}" for cost in (first, other)]
    cells += [f"{cost.messages:,}" for cost in (first, other)]
    cells += [f"{cost.num_bytes / 1e6:.3f}" for cost in (first, other)]
    cells += [f"{cost.descriptors:,}" for cost in (first, other)]
    return f"| {row.part} | {row.ranks:,} | " + " | ".join(cells) + " |"
