"""The Flight Recorder keeps working after its own errors."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_debug.flight import collect as collecting
from titan_debug.flight.collect import collect
from titan_debug.flight.stacks import StacksFile, left_stacks
from titan_debug.flight.watchdog import Watchdog
from titan_debug.request import Request, Requests, send_request
from titan_testing import PATIENCE

WORLD: Any = SimpleNamespace(rank=1, size=2, mesh=SimpleNamespace(names=()))


def test_an_error_does_not_end_the_watchdog(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answered: list[str] = []

    def answer(request: Request) -> None:
        answered.append(request.why)
        if request.why == "first":
            raise KeyError("a private table of torch's")

    watchdog = Watchdog(Requests(tmp_path), 0.2, PATIENCE, lambda step, seconds: None, answer)
    closed = (tmp_path / "stacks").open("w")
    closed.close()
    watchdog.start(closed)  # an unusable file is reported too
    for why in ("first", "second"):
        send_request(tmp_path, why)
        deadline = time.monotonic() + PATIENCE
        while why not in answered and time.monotonic() < deadline:
            time.sleep(0.01)
    assert watchdog._thread.is_alive()
    watchdog.stop()
    assert not watchdog._thread.is_alive()
    assert answered == ["first", "second"]
    assert "a private table of torch's" in caplog.text and "closed file" in caplog.text


def test_a_rank_dumps_its_stacks_without_torchs_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*arguments: object) -> None:
        raise KeyError("process_group")

    monkeypatch.setattr(collecting, "process_groups", lambda world: [])
    monkeypatch.setattr(collecting, "recorded_entries", changed)
    dump = collect(WORLD, "why", attempt=1.0, since=0.0, step=3, in_step=True, lost=False)
    assert (dump.recorded, dump.entries, dump.step) == (False, [], 3)
    assert any(frame.function.startswith("test_a_rank_dumps") for frame in dump.main_stack)


DEATH = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00000000000000ff (most recent call first):\n"


def test_a_new_attempt_keeps_the_stacks_of_a_crashed_one(tmp_path: Path) -> None:
    path = tmp_path / "debug" / "flight" / "rank-1.stacks.txt"
    first = StacksFile(path.parent, 1, 1.0)
    assert first.file is not None
    print(DEATH, file=first.file, flush=True)
    first.close()
    crashed = path.read_text()
    second = StacksFile(path.parent, 1, 2.0)
    assert left_stacks(path.parent, []) == []  # none of the current attempt
    second.close()
    assert path.read_text() == crashed  # the second wrote no stacks
    (left,) = left_stacks(path.parent, [])
    assert (left.rank, left.attempt, left.died) == (1, 1.0, True)


def test_an_attempt_without_stacks_leaves_no_file(tmp_path: Path) -> None:
    StacksFile(tmp_path / "debug" / "flight", 1, 1.0).close()
    assert not (tmp_path / "debug").exists()
