"""The status line of a terminal, and the phases and the progress that it shows."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from harness.jobs import TINY, make_job
from harness.terminal import Screen, Terminal, python
from titan_core.loop.training import train
from titan_core.toolkit import status as phases, status_line
from titan_core.toolkit.status import RunProgress, current_phase, phase
from titan_core.toolkit.status_line import StatusLine, _bar, _Pace

START = """
import os, signal, sys, time
from titan_core.toolkit.status import RunProgress, phase, show_progress
from titan_core.toolkit.status_line import StatusLine

def wait_for_a_line():
    input()

"""
ENDINGS = {
    "return": ("", 0),
    "error": ("raise ValueError('no')", 1),
    "exit": ("sys.exit(3)", 3),
    "interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("shown", ["phase", "bar"])
def test_nothing_is_left_behind(ending: str, shown: str) -> None:
    code, expected = ENDINGS[ending]
    script = f"""{START}
with StatusLine():
    with phase("reading the data"):
        {"show_progress(RunProgress('tiny', 10, 3))" if shown == "bar" else "pass"}
        sys.stdin.readline()
        {code or "pass"}
"""
    terminal = Terminal(python(script))
    terminal.wait_for("3/10" if shown == "bar" else "reading the data 0 s")
    terminal.press("\n")
    status, screen = terminal.end()
    assert status == expected
    assert screen.cursor_is_visible and "\x1b[?25l" not in terminal.written
    seen = "\n".join(screen.rows)
    assert "reading" not in seen.replace('phase("reading', "") and "━" not in seen and "3/10" not in seen
    assert ("ValueError: no" in seen) == (ending == "error")


def test_what_the_process_prints_stays_above_the_line() -> None:
    script = f"""{START}
import logging
with StatusLine():
    logging.basicConfig(format="titan: %(message)s")
    show_progress(RunProgress("tiny", 10, 3))
    sys.stdin.readline()
    print("from stdout")
    print("in", end=" ")
    print("two parts")
    logging.warning("from a logger")
    os.write(2, b"from C++, and long enough to cover what is there, as its messages are" + b"." * 40 + b"\\n")
    sys.stdin.readline()
"""
    terminal = Terminal(python(script), columns=100)
    terminal.wait_for("3/10")
    terminal.press("\n")
    terminal.wait_for("from C++")
    terminal.wait_for("\r\n\r")  # drawn again
    terminal.press("\n")
    status, screen = terminal.end()
    rows = [row for row in screen.rows if row]
    assert status == 0
    assert rows[:3] == ["from stdout", "in two parts", "titan: from a logger"]
    assert "from C++, and long enough to cover what is there, as its messages are....." in "".join(rows[3:])
    assert not any("3/10" in row for row in rows)


def test_a_bar_of_a_library_appears_in_the_line() -> None:
    pytest.importorskip("tqdm", reason="shows a bar of tqdm, which titan-launch itself does not need")
    script = f"""{START}
from tqdm import tqdm
with StatusLine(), phase("reading the data"):
    bar = tqdm(total=4, desc="Downloading", mininterval=0)
    bar.update(1)
    sys.stdin.readline()
    bar.update(3)
    bar.close()
"""
    terminal = Terminal(python(script), columns=100)
    terminal.wait_for("reading the data 0 s Downloading:  25%")
    terminal.press("\n")
    status, screen = terminal.end()
    rows = [row for row in screen.rows if row]
    assert status == 0
    (last,) = rows
    assert last.startswith("Downloading: 100%")


def test_a_bar_of_a_library_that_fails_is_not_left_behind() -> None:
    script = f"""{START}
try:
    with StatusLine(), phase("reading the data"):
        sys.stderr.write("\\rDownloading 25%")
        sys.stderr.flush()
        print("no newline", end="")
        sys.stdin.readline()
        raise ValueError
except ValueError:
    pass
"""
    terminal = Terminal(python(script), columns=100)
    terminal.wait_for("reading the data 0 s")
    terminal.press("\n")
    status, screen = terminal.end()
    assert status == 0
    assert [row for row in screen.rows if row] == ["no newline"]


def test_a_question_has_the_row_for_itself() -> None:
    """Also that of a debugger."""
    script = f"""{START}
with StatusLine() as line, phase("reading the data"):
    sys.stdin.readline()
    breakpoint()
    print("so far", end=" ", flush=True)
    line._draw("reading on")
    print("and done")
    sys.stdin.readline()
"""
    terminal = Terminal(python(script))
    terminal.wait_for("reading the data 0 s")
    terminal.press("\n")
    terminal.wait_for("(Pdb) ")
    terminal.press("continue\n")
    terminal.wait_for("and done")
    asked = terminal.written.partition("(Pdb)")[2]
    terminal.press("\n")
    status, screen = terminal.end()
    assert status == 0 and "(Pdb) so far and done" in screen.rows
    assert "reading" not in asked.partition("and done")[0]
    assert not any("reading" in row for row in screen.rows)


def test_a_forked_process_can_print() -> None:
    script = f"""{START}
line = StatusLine()
with line, phase("reading the data"):
    sys.stdin.readline()
    with line._lock:
        child = os.fork()
    if child == 0:
        print("from the child", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    terminal = Terminal(python(script), PYTHONWARNINGS="ignore")
    terminal.wait_for("reading the data 0 s")
    terminal.press("\n")
    status, screen = terminal.end()
    assert status == 0 and any("from the child" in row for row in screen.rows)


@pytest.mark.parametrize(
    ("columns", "environment"), [(200, {}), (80, {}), (40, {}), (20, {}), (80, {"NO_COLOR": "1"}), (80, {"TERM": "dumb"})]
)
def test_the_line_is_one_row_of_any_terminal(columns: int, environment: dict[str, str]) -> None:
    script = f"""{START}
with StatusLine():
    sys.stdin.readline()
    show_progress(RunProgress("a model of a long name", 1000, 7, loss="4.567"))
    print("ready")
    sys.stdin.readline()
"""
    terminal = Terminal(python(script), columns, **environment)
    terminal.press("\n")
    dumb = environment.get("TERM") == "dumb"
    terminal.wait_for("ready" if dumb else "7/1000")
    screen = Screen(columns)
    screen.feed(terminal.written)
    terminal.press("\n")
    assert terminal.end()[0] == 0
    rows = [row.rstrip() for row in screen.rows if row.strip()]
    if dumb:
        assert rows == ["ready"] and "\x1b" not in terminal.written
        return
    assert rows[0] == "ready" and len(rows) == 2 and "7/1000" in rows[1]
    assert ("loss 4.567" in rows[1]) == (columns >= 80) and ("long name" in rows[1]) == (columns >= 80)
    assert bool(screen.colors) != ("NO_COLOR" in environment)


@pytest.mark.parametrize(
    "environment",
    [{}, pytest.param({"FORCE_COLOR": "1"}, marks=pytest.mark.full), pytest.param({"TERM": "dumb"}, marks=pytest.mark.full)],
)
def test_without_a_terminal_long_phases_are_lines(environment: dict[str, str]) -> None:
    script = f"""{START}
from titan_core.toolkit import status_line
status_line.PLAIN_SECONDS = 0.3
read, write = os.pipe()
os.dup2(os.dup(2), 9); os.dup2(write, 2)   # what is printed to stderr arrives in the pipe
with StatusLine():
    show_progress(RunProgress("tiny", 10, 3))
    with phase("short"):
        pass
    with phase("building the model"):
        first = os.read(read, 4096)
    with phase("waiting", lambda: "1 of 2 joined", repeat_seconds=0.01):
        second = b""
        while second.count(b"\\n") < 3:
            second += os.read(read, 4096)
print((first + second).decode(), end="")
"""
    done = subprocess.run(
        python(script),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )
    building, *waiting = done.stdout.splitlines()
    assert building == "titan: building the model ..."
    assert set(waiting) == {"titan: waiting: 1 of 2 joined (0 s)"} and len(waiting) >= 3


def test_the_remaining_time_ignores_the_first_step() -> None:
    progress = RunProgress("tiny", 100, 10)
    pace = _Pace(progress, now=0.0)
    assert pace.left(5.0) is None
    progress.done = 11  # slow: it compiled
    assert pace.left(60.0) is None
    progress.done = 13
    assert pace.left(64.0) == pytest.approx(87 * 2.0)
    assert pace.left(65.0) == pytest.approx(87 * 2.0 - 1.0)
    progress.done = 100
    assert pace.left(200.0) == 0.0


def test_the_remaining_time_follows_the_last_minute() -> None:
    progress = RunProgress("tiny", 10_000, 0)
    pace = _Pace(progress, now=0.0)
    for second in range(1, 301):
        progress.done += 1 if second <= 200 else 10
        pace.left(float(second))
    assert pace.left(300.0) == pytest.approx((10_000 - progress.done) / 10)


@pytest.mark.parametrize("width", range(8, 200, 7))
def test_a_bar_fits_any_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    console.print(_bar(RunProgress("llama3 8b", 100_000, 1), "0:00:01, 1:02:03 left", width), width=width)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("\n") == 1


def test_only_the_outermost_line_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine() as outer, StatusLine() as inner:
        assert not inner.is_shown and status_line._shown is outer
    assert status_line._shown is None


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the phases, in the order in which they began."""
    names: list[str] = []
    enter = phase.__enter__

    def recorded(self: phase) -> phase:
        names.append(self.name)
        return enter(self)

    monkeypatch.setattr(phase, "__enter__", recorded)
    yield names
    assert current_phase() is None and not phases._phases


def test_a_run_reports_its_phases(in_tmp: Path, entered: list[str]) -> None:
    train(make_job("tiny", TINY))
    assert list(dict.fromkeys(entered)) == [
        "reading the data", "preparing the device", "building the model", "building the optimizer", "first step",
        "finishing pending writes",
    ]  # fmt: skip


def test_phases_end_with_an_error(entered: list[str]) -> None:
    with pytest.raises(ValueError, match="no"), phase("outer"), phase("inner"):
        raise ValueError("no")
    assert entered == ["outer", "inner"]
    assert sys.exc_info() == (None, None, None)
