"""The parts of the full run: each test marked `full` is in one of them, and all others are in every one."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from harness.full_share import deselect_others, share


@pytest.mark.parametrize("text", ["4/4", "1", "-1/4", "1/0", "a/b"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not I/N with I from 0 to N - 1"):
        share(text)


class Item:
    def __init__(self, name: str, full: bool) -> None:
        self.nodeid, self._full = name, full

    def get_closest_marker(self, name: str) -> bool:
        return self._full and name == "full"


def test_every_full_test_is_in_one_part() -> None:
    every: list[Any] = [Item(f"tests/a.py::test_{number}", full=number % 5 == 0) for number in range(1000)]
    seen: list[str] = []
    for part in range(4):
        items, left_out = list(every), []
        hook: Any = argparse.Namespace(pytest_deselected=lambda items, kept=left_out: kept.extend(items))
        config: Any = argparse.Namespace(hook=hook)
        deselect_others(config, items, share(f"{part}/4"))
        assert len(items) + len(left_out) == len(every)
        assert sum(not item.get_closest_marker("full") for item in items) == 800
        seen += [item.nodeid for item in items if item.get_closest_marker("full")]
        assert 30 < len(items) - 800 < 70
    assert sorted(seen) == sorted(item.nodeid for item in every if item.get_closest_marker("full"))
