"""`titan watch`: the view of a run whose files are being written, truncated and replaced."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.made_runs import BEGAN, end, record, start, validation, write_lines, write_run
from titan_core.cli.main import main
from titan_core.toolkit.json_lines import read_lines
from titan_core.toolkit.processes import pid_namespace
from titan_core.toolkit.runs import tail
from titan_core.toolkit.runs.tail import Tail
from titan_report.attempts import Attempt, pace_of, state_of
from titan_report.dashboard import frame, plot
from titan_report.followed_run import FollowedRun
from titan_testing import PATIENCE
from titan_testing.jobs import run_recipe

HERE = {"host": socket.gethostname(), "pid_namespace": pid_namespace()}
NOBODY = 2**22 + 1
"""A process id above the largest possible one."""
NAMESPACES_VISIBLE = pytest.mark.skipif(pid_namespace() is None, reason="this system does not show a process's namespace")


def screen(run: FollowedRun, width: int = 80, height: int = 24) -> str:
    """Return the frame as a terminal of that size shows it."""
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False, legacy_windows=False)
    console.print(frame(run, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def steps_of(run: FollowedRun) -> list[int]:
    return [record["step"] for record in run.steps.records]


def followed(path: Path) -> FollowedRun:
    run = FollowedRun(path)
    run.poll()
    return run


def now(records: list[dict[str, Any]], ago: float = 0.0) -> list[dict[str, Any]]:
    """Shift the times of ``records`` so that the last was written ``ago`` seconds ago."""
    shift = time.time() - ago - records[-1]["time"]
    return [{**record, "time": record["time"] + shift} for record in records]


def test_a_real_run_shown_once(in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tiny = {
        "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}", "training.seq_len": 32,
        "training.local_batch_size": 2, "training.global_batch_size": 4, "training.steps": 6, "metrics.log_freq": 1,
    }  # fmt: skip
    losses = run_recipe("tiny", dict(tiny)).losses
    capsys.readouterr()
    assert main(["watch", "--once", "outputs/tiny"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert re.match(r"tiny  tiny debug \(37\.0K parameters\) +finished", lines[0])
    assert re.search(r"step 6/6 .*100%  took \d+ s", lines[1])
    assert f"{losses[-1]:.4f}" in text and "768 tokens" in text
    assert f"{max(losses):.2f}" in text  # the chart's upper edge
    assert any("\u2800" < letter <= "\u28ff" for letter in text)
    assert lines[-1].endswith("step 6  finished")
    (process,) = read_lines(Path("outputs/tiny/events.jsonl"))[0]["processes"]
    assert process == {**HERE, "pid": os.getpid()}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (20, 5), (63, 18), (64, 40), (220, 70)])
def test_the_view_fills_terminals_of_any_size(tmp_path: Path, width: int, height: int) -> None:
    events = [start(), *({"event": "checkpoint", "time": BEGAN + n, "step": n, "path": "checkpoint"} for n in range(1, 90))]
    run = followed(write_run(tmp_path / "a", events=events, validations=[validation(90, 2.5)]))
    lines = screen(run, width, height).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 11)
    if height >= 18:
        assert len(lines) == height
        assert any("\u2800" < letter <= "\u28ff" for letter in "".join(lines))


def test_the_metrics(tmp_path: Path) -> None:
    more = {"loss_max": 3.25, "corrupt_records": 7}
    text = screen(
        followed(write_run(tmp_path / "a", more=lambda step: more, validations=[validation(50, 2.75), validation(100, 3.0)]))
    )
    for shown in (
        "at most 3.2500", "0.001", "3.0000 at 100, best 2.7500", "409,600 tokens, epoch 0", "4,096", "2,048, 1.5 TFLOP/s",
        "41.0%", "3.00 GiB peak, 4.00 reserved", "1.000 s, 7 corrupt",
        "forward and backward 80%, optimizer 10%, data 5%, checkpoint 2%",
        "goodput     not recorded",
    ):  # fmt: skip
        assert shown in text


def test_a_running_run_shows_the_time_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=0, events=now([start(steps=100)], ago=41))
    write_lines(folder / "metrics.jsonl", now([record(step) for step in range(1, 41)]))
    run = followed(folder)
    assert run.state() == "running"
    assert run.seconds_left() == pytest.approx(60, abs=2)
    assert re.search(r"step 40/100 .* 40%  (1 min 0 s|1 min 1 s|59 s|58 s) left", screen(run))


@pytest.mark.parametrize(
    ("ago", "processes", "state"),
    [
        (30.0, [{"host": "elsewhere", "pid": 1}], "running"),
        (3600.0, [{"host": "elsewhere", "pid": 1}], "no end event: killed or stalled; no output for 1 h 0 min"),
        (1.0, [{**HERE, "pid": os.getpid()}], "running"),
        pytest.param(1.0, [{**HERE, "pid": NOBODY}], "killed", marks=NAMESPACES_VISIBLE),
        # A container on this host with its own process ids, and runs that did not record the namespace.
        (1.0, [{**HERE, "pid": NOBODY, "pid_namespace": "pid:[1]"}], "running"),
        (1.0, [{"host": socket.gethostname(), "pid": NOBODY}], "running"),
        (1.0, [{**HERE, "pid": NOBODY, "pid_namespace": None}], "running"),
    ],
)
def test_a_run_without_an_end(tmp_path: Path, ago: float, processes: list[dict[str, Any]], state: str) -> None:
    events = now([start(processes=processes)], ago=ago + 10)
    folder = write_run(tmp_path / "a", steps=0, events=events)
    write_lines(folder / "metrics.jsonl", now([record(step) for step in range(1, 10)], ago=ago))
    assert screen(followed(folder)).splitlines()[0].endswith(state)


def test_the_pace_determines_when_a_run_is_stalled() -> None:
    assert pace_of([0.0]) is None
    assert pace_of([0.0, 1.0, 2.0, 3.0]) == 10.0
    assert pace_of([0.0, 1.0, 2.0, 303.0]) == 602.0  # such as a long validation


@pytest.mark.parametrize(
    ("pace", "quiet", "state"),
    [
        (None, 599.0, "running"),  # the first step may compile
        (None, 601.0, "stalled"),
        (10.0, 59.0, "running"),
        (10.0, 61.0, "stalled"),
        (300.0, 299.0, "running"),
        (300.0, 301.0, "stalled"),
    ],
)
def test_a_run_may_be_quiet_for_as_long_as_its_pace_allows(pace: float | None, quiet: float, state: str) -> None:
    assert state_of(Attempt(start(), None, BEGAN, replaced=False), pace, quiet) == state


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (end(50, at=60, completed=True), "finished"),
        (end(50, at=60, reason="the dataset has ended"), "ended: the dataset has ended"),
        (end(50, at=60, preempted=True), "preempted"),
        (end(50, at=60, failed=True, error="ValueError: [red]no[/red]"), "failed: ValueError: [red]no[/red]"),
    ],
)
def test_the_view_shows_how_a_run_ended(tmp_path: Path, ending: dict[str, Any], state: str) -> None:
    text = screen(followed(write_run(tmp_path / "a", steps=50, events=[start(), ending])))
    assert text.splitlines()[0].endswith(state)
    assert text.splitlines()[-1].endswith(state)


def test_each_line_is_read_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    parsed = tail.parsed
    monkeypatch.setattr(tail, "parsed", lambda line: (read.append(line), parsed(line))[1])
    folder = write_run(tmp_path / "a", steps=5000, events=[start(steps=9000)])
    run = followed(folder)
    assert len(read) == 5001
    run.poll()
    write_lines(folder / "metrics.jsonl", [record(5001), record(5002)], mode="a")
    run.poll()
    assert len(read) == 5003
    assert run.last["step"] == 5002
    kept = steps_of(run)
    assert kept[0] == 1 and kept[-1] == 5002 and len(kept) < 5000


def test_an_incomplete_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n{"b": "\xc3')
    lines = Tail(file)
    assert lines.read() == (False, [{"a": 1}])
    assert lines.read() == (False, [])
    with file.open("ab") as opened:
        opened.write(b'\xa9"}\n')
    assert lines.read() == (False, [{"b": "é"}])
    # A killed process leaves half a line, and the next process truncates it.
    with file.open("ab") as opened:
        opened.write(b'{"c": ')
    assert lines.read() == (False, [])
    os.truncate(file, file.stat().st_size - 6)
    with file.open("ab") as opened:
        opened.write(b'{"d": 4}\nno JSON\n')
    assert lines.read() == (False, [{"d": 4}])
    assert lines.damaged == 1


@pytest.mark.parametrize(
    "other", ['{"step": 7}\n', '{"step": 9, "longer": "' + "x" * 4000 + '"}\n'], ids=["shorter", "longer"]
)
def test_a_replaced_file_is_read_from_the_start(tmp_path: Path, other: str) -> None:
    file = tmp_path / "a.jsonl"
    write_lines(file, [{"step": n} for n in range(3)])
    lines = Tail(file)
    lines.read()
    file.write_text(other)
    assert lines.read() == (True, [json.loads(other)])
    file.unlink()
    assert lines.read() == (True, [])
    assert lines.read() == (False, [])
    file.write_text(other)
    assert lines.read() == (False, [json.loads(other)])


def test_a_run_that_starts_afresh_while_it_is_watched(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", validations=[validation(50, 1.0)])
    run = followed(folder)
    assert "step 100/100" in screen(run)
    previous = folder / "previous" / "1"
    previous.mkdir(parents=True)
    for name in ("config.toml", "plugins.json", "metrics.jsonl", "events.jsonl"):
        (folder / name).rename(previous / name)
    run.poll()
    assert screen(run).startswith("waiting for a run in")
    write_lines(folder / "events.jsonl", now([start(steps=10)], ago=4))
    write_lines(folder / "metrics.jsonl", now([record(step, loss=7.5) for step in range(1, 4)]))
    run.poll()
    text = screen(run)
    assert "step 3/10" in text and "7.5000" in text and "running" in text
    assert "best" not in text
    assert steps_of(run) == [1, 2, 3]


def test_a_run_that_is_resumed_while_it_is_watched(tmp_path: Path) -> None:
    """The metrics are rewritten without those after the checkpoint; events are appended."""
    folder = write_run(tmp_path / "a", steps=60, events=[start()])
    run = followed(folder)
    (folder / "metrics.jsonl").rename(tmp_path / "old")
    write_lines(folder / "metrics.jsonl", [record(step) for step in range(1, 41)])
    write_lines(folder / "events.jsonl", now([start(40)]), mode="a")
    run.poll()
    assert steps_of(run) == list(range(1, 41))
    text = screen(run)
    assert "running, attempt 2" in text and "restarted after step 40" in text
    assert "killed: no output after this" in text


def test_a_run_that_went_back_says_so(tmp_path: Path) -> None:
    back = {"event": "rewind", "time": BEGAN + 32, "step": 14, "from": 31, "documents": 12}
    whole = write_run(tmp_path / "a", events=[start(), back, start(14, at=40), end(100, at=160, completed=True)])
    shown = screen(followed(whole), height=40)
    assert "attempt 2, went back 1 time" in shown
    assert "step 14  went back from step 31 to step 14, without 12 documents" in shown
    assert "went back" not in screen(followed(write_run(tmp_path / "b")))


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    assert "loss: no value yet" in screen(followed(write_run(tmp_path / "a", more=lambda step: {"loss": None})))
    text = screen(followed(write_run(tmp_path / "b", more=lambda step: {"loss": None if 40 < step < 60 else 2.0})))
    assert "2.0000" in text


def test_foreign_lines_are_counted_and_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    write_lines(folder / "events.jsonl", [{}, {"event": "end", "time": "noon", "step": 1}, {"event": "start"}], mode="a")
    write_lines(folder / "metrics.jsonl", [{"loss": 1.0}, {"step": "2", "loss": 1.0}, {"step": 101, "loss": 2.0}], mode="a")
    write_lines(folder / "metrics.jsonl", [{"step": 6, "loss": 1.0, "time": 1}], mode="a")  # an earlier step
    write_lines(folder / "events.jsonl", [start(mesh=5), start() | {"time": 1e300}], mode="a")
    run = followed(folder)
    assert run.damaged == 8 and run.last["step"] == 101
    assert "finished" in screen(run) and "8 damaged lines" in screen(run)
    (folder / "config.toml").unlink()
    (folder / "config.toml").mkdir()
    assert "finished" in screen(followed(folder))


def test_the_curve() -> None:
    assert plot([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0], columns=2, rows=1, bottom=0, top=3) == ["⡠⠊"]
    assert plot([0, 1, 2, 3], [0.0, None, None, 3.0], columns=2, rows=1, bottom=0, top=3) == ["⡀⠈"]
    assert plot([5], [1.0], columns=1, rows=1, bottom=1, top=1) == ["⡀"]


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--once", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["watch", "--once", str(tmp_path)]) == 2
    assert "has written nothing yet; drop --once to wait for it" in capsys.readouterr().err
    assert main(["watch", str(tmp_path)]) == 2
    assert "needs a terminal, but stdout is not one; add --once" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--interval", "0"]) == 2
    assert "not a number of seconds from 0.01 to 2592000" in capsys.readouterr().err


def test_on_a_terminal_it_waits_follows_and_ends_quietly(tmp_path: Path) -> None:
    main_end, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "titan_core", "watch", str(tmp_path / "run"), "--interval", "0.05"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment)
    os.close(terminal)
    try:
        shown = read_until(main_end, "waiting for a run")
        assert "\x1b[?1049h" in shown  # the alternate screen, so that the user's screen is restored afterwards
        folder = write_run(tmp_path / "run", steps=3, events=now([start(steps=10)], ago=4))
        read_until(main_end, "step 3/10")
        write_lines(folder / "metrics.jsonl", [record(4)], mode="a")
        read_until(main_end, "step 4/10")
        process.send_signal(signal.SIGINT)
        read_until(main_end, "\x1b[?1049l")
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None and process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        os.close(main_end)


def read_until(terminal: int, expected: str, timeout: float = PATIENCE) -> str:
    """Read from the terminal until ``expected`` appears; return the output."""
    seen = ""
    limit = time.monotonic() + timeout
    while expected not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, limit - time.monotonic()))
        assert ready, f"{expected!r} did not appear within {timeout} s, but {seen[-2000:]!r} did"
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen
