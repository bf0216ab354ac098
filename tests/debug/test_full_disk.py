"""No statistics are lost if the disk is full for a while."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from harness.jobs import TINY, run_recipe
from titan_core.toolkit import json_lines
from titan_core.toolkit.json_lines import read_lines

RUN: dict[str, object] = {**TINY, "job.dump_folder": "run"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


class Disk:
    """Lets ``failures`` writes fail from the ``first`` one on, each after a part of the line has been written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, first: int, failures: int) -> None:
        self._number, self._failing = number, range(first, first + failures)
        self.writes = 0
        monkeypatch.setattr(json_lines, "_write", self.write)

    def write(self, descriptor: int, line: bytes) -> int:
        self.writes += 1
        if self.writes in self._failing:
            os.write(descriptor, line[: len(line) // 2])
            raise OSError(self._number, os.strerror(self._number))
        return os.write(descriptor, line)


def test_no_statistics_are_lost_while_the_disk_is_full(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, errno.ENOSPC, first=1, failures=5)
    run_recipe("tiny", {**RUN, "numerics.statistics_freq": 1})
    assert [line["step"] for line in metrics(in_tmp / "run")] == [1, 2, 4]
    assert {event["event"] for event in read_lines(in_tmp / "run/events.jsonl")} == {"start", "spent", "end"}
    statistics = read_lines(in_tmp / "run/debug/statistics/rank-0.jsonl")
    assert [line["step"] for line in statistics] == [1, 2, 3, 4]
