"""Runs of any length and files with hostile lines: what is read of them is bounded."""

from __future__ import annotations

import json
import random
import statistics
import tracemalloc
from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.runlog.run_directory import _up_to
from titan_core.toolkit import json_lines
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.runs.tail import Tail
from titan_core.toolkit.runs.thinned import EXTREMES, KEPT, SignsOfLife, Thinned
from titan_report.followed_run import FollowedRun

START = {"event": "start", "time": 1000.0, "step": 0, "steps": 10**6, "world_size": 1}


def record(step: int, loss: float | None = None) -> dict[str, object]:
    value = random.Random(step).random() if loss is None else loss
    return {"step": step, "time": 1000.0 + step, "loss": value, "tokens_per_second": 5.0 + step % 7, "step_seconds": 1.0}


def write_run(folder: Path, lines: list[bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    (folder / "events.jsonl").write_text(json.dumps(START) + "\n")
    return folder


def line(step: int) -> bytes:
    return json.dumps(record(step)).encode() + b"\n"


def test_a_short_run_is_kept_whole() -> None:
    records = [record(step) for step in range(2 * KEPT)]
    assert Thinned(records).records == records == Thinned(records).even


def test_of_a_long_run_ends_spikes_and_gaps_remain() -> None:
    count = 37 * KEPT + 5
    thinned = Thinned()
    for step in range(count):
        thinned.add(record(step, {40_001: 99.0, 40_002: float("nan"), 60_000: -1.0}.get(step)))
    steps = [one["step"] for one in thinned.records]
    assert steps == sorted(set(steps)) and thinned.count == count
    assert {0, 40_001, 40_002, 60_000, count - 1} <= set(steps)
    assert len(thinned.even) <= 2 * KEPT and len(steps) <= 2 * KEPT + 3 * len(EXTREMES) * KEPT
    spacings = {b["step"] - a["step"] for a, b in zip(thinned.even, thinned.even[1:], strict=False)}
    assert len(spacings) == 1  # evenly spaced, so that medians are fair
    assert statistics.median(one["tokens_per_second"] for one in thinned.even) == 8.0


def test_signs_of_life_keep_the_last_of_each_attempt() -> None:
    signs = SignsOfLife([0.0, 500.5])
    for time in range(5000):
        signs.add(float(time))
    assert {500.0, 4999.0} <= set(signs.times) and len(signs.times) < 1100
    signs.begin([0.0, 500.5, 4500.5])  # a start that is read after the records that follow it
    assert {500.0, 4500.0, 4999.0} <= set(signs.times)


@pytest.mark.full
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        folder = write_run(tmp_path, [line(step) for step in range(count)])
        tracemalloc.start()
        run = FollowedRun(folder)
        run.poll()
        log = RunLog.read(folder)
        assert run.last["step"] == log.steps[-1]["step"] == count - 1
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(16 * KEPT) < 1.5 * peak(4 * KEPT)


HOSTILE = {"deep": b"[" * 200_000 + b"\n", "long": b'{"step": "' + b"x" * 3 * 2**20 + b'"}\n'}
WHY = {"deep": "its lists and objects are nested too deeply", "long": "is longer than 1048576 bytes"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_line_that_no_run_writes_is_skipped_and_counted(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path, [line(1), HOSTILE[kind], line(2), HOSTILE[kind], line(3)])
    run = FollowedRun(folder)
    run.poll()
    assert (run.last["step"], run.damaged) == (3, 2)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line(4))
    run.poll()
    assert (run.last["step"], run.damaged) == (4, 2)  # the file is still the same one
    assert [one["step"] for one in RunLog.read(folder).steps] == [1, 2, 3, 4]
    assert main(["report", str(folder)]) == 0
    assert f"{folder}: skipped 2 lines that are too long or nested too deeply" in capsys.readouterr().err
    assert main(["watch", str(folder), "--once"]) == 0
    assert "2 damaged lines" in capsys.readouterr().out
    with pytest.raises(UserError, match=rf"metrics.jsonl:2: {WHY[kind]}"):
        list(_up_to(3, folder / "metrics.jsonl"))  # a resumed run continues the file, and must not lose lines


def test_an_endless_line_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 100)
    (tmp_path / "lines.jsonl").write_bytes(b"{}\n" + b"x" * 1000 + b"\n{}\n" + b"y" * 1000)
    tail = Tail(tmp_path / "lines.jsonl")
    assert tail.read() == (False, [{}, {}]) and tail.damaged == 1
    with (tmp_path / "lines.jsonl").open("ab") as file:
        file.write(b"y\n{}\n")
    assert tail.read() == (False, [{}]) and tail.damaged == 2
