"""Some of the tests marked ``full``: ``--full-share I/N`` runs the I-th of N parts of about equal size, beside all others.

Each commit runs another part, and the scheduled job runs all of them: a mistake that only one row finds is found within a
day, in exchange for a shorter run before each change."""

from __future__ import annotations

import argparse
import re
import zlib

import pytest

Share = tuple[int, int]


def share(text: str) -> Share:
    """Parse ``I/N``, with ``I`` from 0 to ``N - 1``.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N - 1, such as 0/4")
    return int(found[1]), int(found[2])


def deselect_others(config: pytest.Config, items: list[pytest.Item], chosen: Share) -> None:
    """Deselect the tests marked ``full`` that are in other parts. A test's part follows from its name."""
    part, parts = chosen
    others = [item for item in items if item.get_closest_marker("full") and zlib.crc32(item.nodeid.encode()) % parts != part]
    left = {id(item) for item in others}
    items[:] = [item for item in items if id(item) not in left]
    config.hook.pytest_deselected(items=others)
