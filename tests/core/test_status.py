"""The status line of a terminal, and the phases and the progress that it shows."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress, Task

from harness.terminal import Screen, Terminal, python
from titan_core.loop.training import train
from titan_core.toolkit import status
from titan_core.toolkit.status import StatusLine, _row, _times, current_phase, phase, shown_task
from titan_testing.jobs import TINY, make_job

START = """
import os, signal, sys, time
from contextlib import ExitStack
from rich.progress import Progress
from titan_core.toolkit.status import StatusLine, phase, shown_task

shown = ExitStack()
def show_progress(name, total, done, loss="-"):
    progress = Progress(auto_refresh=False)
    progress.add_task(name, total=total, completed=done, loss=loss)
    shown.enter_context(shown_task(progress.tasks[0]))

"""
ENDINGS = {
    "return": ("", 0),
    "error": ("raise ValueError('no')", 1),
    "exit": ("sys.exit(3)", 3),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)", -signal.SIGKILL),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("shown", ["phase", "bar"])
def test_nothing_is_left_behind(ending: str, shown: str) -> None:
    code, expected = ENDINGS[ending]
    script = f"""{START}
with StatusLine():
    with phase("reading the data"):
        {"show_progress('tiny', 10, 3)" if shown == "bar" else "pass"}
        sys.stdin.readline()
        {code or "pass"}
"""
    terminal = Terminal(python(script))
    terminal.wait_for("3/10" if shown == "bar" else "reading the data 0 s")
    terminal.press("\n")
    status, screen = terminal.end()
    assert status == expected
    assert screen.cursor_is_visible
    if ending == "SIGKILL":
        return
    seen = "\n".join(screen.rows)
    assert "reading" not in seen.replace('phase("reading', "") and "━" not in seen and "3/10" not in seen
    assert ("ValueError: no" in seen) == (ending == "error")


def test_what_the_process_prints_stays_above_the_line() -> None:
    script = f"""{START}
import logging
with StatusLine():
    logging.basicConfig(format="titan: %(message)s")
    show_progress('tiny', 10, 3)
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
    terminal.press("\n")
    status, screen = terminal.end()
    rows = [row for row in screen.rows if row]
    assert status == 0
    assert rows[:3] == ["from stdout", "in two parts", "titan: from a logger"]
    assert "from C++, and long enough to cover what is there, as its messages are....." in "".join(rows[3:])
    assert not any("3/10" in row for row in rows)


def test_a_bar_of_a_library_shows_few_frames() -> None:
    """Each is a line above ours."""
    pytest.importorskip("tqdm", reason="shows a bar of tqdm, which titan-launch itself does not need")
    script = f"""{START}
with StatusLine(), phase("reading the data"):
    from tqdm import tqdm
    for _ in tqdm(range(20), desc="Downloading"):
        time.sleep(0.1)
"""
    status, screen = Terminal(python(script), columns=100).end()
    rows = [row for row in screen.rows if row]
    assert status == 0
    assert [row[:17] for row in rows] == ["Downloading:   0%", "Downloading: 100%"]


def test_a_debugger_can_be_used() -> None:
    script = f"""{START}
with StatusLine(), phase("reading the data"):
    sys.stdin.readline()
    breakpoint()
    print("and done")
"""
    terminal = Terminal(python(script))
    terminal.wait_for("reading the data 0 s")
    terminal.press("\n")
    terminal.wait_for("(Pdb) ")
    terminal.press("p 40 + 2\n")
    terminal.wait_for("42")
    terminal.press("continue\n")
    status, screen = terminal.end()
    assert status == 0 and "42" in screen.rows and "and done" in screen.rows


def test_a_forked_process_can_print() -> None:
    script = f"""{START}
import logging
line = StatusLine()
with line, phase("reading the data"):
    logging.basicConfig()
    sys.stdin.readline()
    with line._live.console._lock, line._live._lock:
        child = os.fork()
    if child == 0:
        print("from the child", flush=True)
        logging.warning("from its logger")
        os._exit(0)
    os.waitpid(child, 0)
"""
    terminal = Terminal(python(script), PYTHONWARNINGS="ignore")
    terminal.wait_for("reading the data 0 s")
    terminal.press("\n")
    status, screen = terminal.end()
    seen = "\n".join(screen.rows)
    assert status == 0 and "from the child" in seen and "from its logger" in seen


@pytest.mark.parametrize(
    ("columns", "environment"), [(200, {}), (80, {}), (40, {}), (20, {}), (80, {"NO_COLOR": "1"}), (80, {"TERM": "dumb"})]
)
def test_the_line_is_one_row_of_any_terminal(columns: int, environment: dict[str, str]) -> None:
    script = f"""{START}
with StatusLine():
    sys.stdin.readline()
    show_progress("a model of a long name", 1000, 7, loss="4.567")
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
from titan_core.toolkit import status
status.PLAIN_SECONDS = 0.3
read, write = os.pipe()
os.dup2(os.dup(2), 9); os.dup2(write, 2)   # what is printed to stderr arrives in the pipe
with StatusLine():
    show_progress('tiny', 10, 3)
    with phase("short"):
        pass
    with phase("building the model"):
        first = b""
        while not first.endswith(b"\\n"):  # a line and its end may arrive apart
            first += os.read(read, 4096)
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


def progress(total: int, done: int, **options: Any) -> tuple[Progress, Task]:
    bar = Progress(auto_refresh=False, **options)
    bar.add_task("llama3 8b", total=total, completed=done, loss="-")
    return bar, bar.tasks[0]


def test_the_remaining_time_ignores_the_first_step() -> None:
    now = [0.0]
    bar, task = progress(100, 10, get_time=lambda: now[0])
    now[0] = 60.0  # slow: it compiled
    bar.update(task.id, completed=11)
    assert _times(task) == "0:01:00"
    now[0] = 64.0
    bar.update(task.id, completed=13)
    assert _times(task) == "0:01:04, 0:02:54 left"


@pytest.mark.parametrize("width", range(8, 200, 7))
def test_a_bar_fits_any_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    with shown_task(progress(100_000, 1)[1]):
        console.print(_row(width), width=width)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("\n") == 1


def test_only_the_outermost_line_is_shown() -> None:
    with StatusLine() as outer:
        with StatusLine():
            assert status._shown is outer
        assert status._shown is outer
    assert status._shown is None


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
    assert current_phase() is None and not status._phases


def test_a_run_reports_its_phases(in_tmp: Path, entered: list[str]) -> None:
    train(make_job("tiny", TINY))
    assert list(dict.fromkeys(entered)) == [
        "reading the data", "preparing the device", "reading the first documents", "building the model",
        "building the optimizer", "first step",
        "finishing pending writes",
    ]  # fmt: skip


def test_phases_end_with_an_error(entered: list[str]) -> None:
    with pytest.raises(ValueError, match="no"), phase("outer"), phase("inner"):
        raise ValueError("no")
    assert entered == ["outer", "inner"]
    assert sys.exc_info() == (None, None, None)
