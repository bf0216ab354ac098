"""Shows what this process is doing: in the last row of a terminal, by rich; elsewhere in lines. Free of torch.

The code that works only sets values: the phases that it enters, and the task of rich that counts the steps of its run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from titan_core.toolkit.text import printable, say

if TYPE_CHECKING:  # rich is imported once there is a terminal
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live
    from rich.progress import Task
    from rich.segment import Segment
    from rich.text import Text

PLAIN_SECONDS = 2.0
"""Without a terminal, a phase that lasts longer is printed."""
_REFRESH_SECONDS = 0.1
ERASE = "\r\x1b[2K"
"""Erases the current row of a terminal."""

_MAIN_THREAD = threading.main_thread().ident
_phases: list[phase] = []
_tasks: list[Task] = []
finished: deque[tuple[str, float, float]] = deque(maxlen=64)
"""The last phases: name, start and end (``time.monotonic``)."""
_hidden = False
_shown: StatusLine | None = None


class phase:
    """Work that may be slow: ``with phase("building the model"): ...``. The innermost phase is shown. Entering and leaving
    costs about a microsecond. Outside of the main thread, a phase is not shown."""

    def __init__(self, name: str, detail: Callable[[], str] = str, repeat_seconds: float | None = None) -> None:
        """
        Args:
            detail: returns how far the work is. Called only to show it, from another thread.
            repeat_seconds: how often to repeat the line if the output is not a terminal (default: not at all).
        """
        self.name, self.detail, self.repeat_seconds = name, detail, repeat_seconds

    def __enter__(self) -> phase:
        self.began = time.monotonic()
        self._is_listed = threading.get_ident() == _MAIN_THREAD
        if self._is_listed:
            _phases.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_listed:
            _phases.remove(self)
            finished.append((self.name, self.began, time.monotonic()))

    def __str__(self) -> str:
        detail = self.detail()
        return f"{self.name}: {detail}" if detail else self.name

    def lasted(self) -> str:
        """Return how long the work has taken so far."""
        seconds = int(time.monotonic() - self.began)
        return f"{seconds} s" if seconds < 120 else str(timedelta(seconds=seconds))


def current_phase() -> phase | None:
    """Return the innermost phase, if any. Safe in any thread."""
    return None if _hidden else next(reversed(_phases), None)


def current_task() -> Task | None:
    """Return the task of the run whose progress is shown, if any."""
    return None if _hidden else next(reversed(_tasks), None)


@contextlib.contextmanager
def shown_task(task: Task) -> Iterator[None]:
    """Show a run's steps as a progress bar within the ``with`` block. The field ``loss`` of ``task`` is shown with it."""
    _tasks.append(task)
    try:
        yield
    finally:
        _tasks.remove(task)


@contextlib.contextmanager
def progress_as_before() -> Iterator[None]:
    """Show phases and progress after the block if they were shown before: an interrupt within hides them."""
    before = _hidden
    try:
        yield
    finally:
        hide_all(before)


def hide_all(hidden: bool = True) -> None:
    """Show no phase and no progress from now on. Safe in a signal handler."""
    global _hidden
    _hidden = hidden


class StatusLine:
    """Shows the phases and the progress of this process within the ``with`` block; what the process prints appears above.
    Inside of another status line, it does nothing. If neither stderr nor stdout is a terminal, each phase that lasts prints
    a line to stderr."""

    def __enter__(self) -> StatusLine:
        global _shown
        if _shown is not None:
            return self
        _shown = self
        hide_all(False)
        self._over = threading.Event()
        self._live = _live()
        if self._live is None:
            threading.Thread(target=_print_phases, args=[self._over], name="status line", daemon=True).start()
        else:
            self._live.start()
            self._live.console.show_cursor()  # a process that is killed leaves a terminal that works
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the line. Safe to call more than once, and from any thread."""
        global _shown
        if _shown is not self:
            return
        _shown = None
        self._over.set()
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):  # the terminal is closed: nobody watches
                self._live.stop()


def _leave_in_child() -> None:
    """Print past rich, whose locks another thread may have held when this process was forked."""
    global _shown
    if _shown is None:
        return
    _shown = None
    sys.stdout, sys.stderr = (getattr(stream, "rich_proxied_file", stream) for stream in (sys.stdout, sys.stderr))
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(getattr(handler.stream, "rich_proxied_file", handler.stream))


os.register_at_fork(after_in_child=_leave_in_child)


def _live() -> Live | None:
    """Return the display of the line; ``None`` without a terminal, or with one that cannot erase a line (``TERM=dumb``)."""
    streams = [stream for stream in (sys.stderr, sys.stdout) if stream.isatty()]  # rich would obey FORCE_COLOR for a file
    if not streams:
        return None
    from rich.console import Console
    from rich.live import Live

    console = Console(file=streams[0], highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_interactive:
        return None
    # A bar of tqdm, whose every frame becomes a line above ours, shows one in a while.
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    return Live(
        get_renderable=_Row,
        console=console,
        transient=True,
        refresh_per_second=1 / _REFRESH_SECONDS,
        redirect_stdout=sys.stdout in streams,
        redirect_stderr=sys.stderr in streams,
    )


class _Row:
    """The row to show. The cursor stays at its begin, so that what C++ prints past rich replaces it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        from rich.control import Control

        width = console.width - 1  # the last column would wrap
        for line in console.render_lines(_row(width), options.update(width=width), pad=False):
            yield from line
        yield Control.move_to_column(0)


def _row(width: int) -> RenderableType:
    """Return the phase, or the progress of the run. A narrow terminal shows less."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    current, task = current_phase(), current_task()
    doing = "" if current is None else printable(f"{current} {current.lasted()}")
    if task is None:
        return _cut(doing, width)
    bar = ProgressBar(task.total, task.completed, complete_style="cyan", finished_style="green")
    cells: list[RenderableType] = [bar, f"{task.completed:>{len(str(task.total))}}/{task.total}"]
    cells.append(_cut(doing or _times(task), max(10, width // 2)))
    if width >= 50:
        cells.insert(2, f"loss {task.fields['loss']}")
    if width >= 70:
        cells.insert(0, _cut(printable(task.description), width // 3))
    table = Table.grid(padding=(0, 1), expand=True)
    for cell in cells:
        table.add_column(ratio=1 if cell is bar else None, no_wrap=True)
    table.add_row(*cells)
    return table


def _times(task: Task) -> str:
    """Return the time that has passed, and the estimate of the rest, to which the slower first step does not count."""
    elapsed, left = timedelta(seconds=int(task.elapsed or 0)), task.time_remaining
    return str(elapsed) if left is None else f"{elapsed}, {timedelta(seconds=int(left))} left"


def _cut(text: str, width: int) -> Text:
    from rich.text import Text

    shown = Text(text, no_wrap=True)
    shown.truncate(width, overflow="crop")
    return shown


def _print_phases(over: threading.Event) -> None:
    """Print phases that last to stderr."""
    announced, due = None, 0.0
    with contextlib.suppress(OSError, ValueError):  # the file is closed: nobody reads it
        while not over.wait(_REFRESH_SECONDS):
            current, now = current_phase(), time.monotonic()
            if current is not announced:
                announced, due = current, float("inf") if current is None else current.began + PLAIN_SECONDS
            if current is None or now < due:
                continue
            repeat = current.repeat_seconds
            say(f"titan: {current} {'...' if repeat is None else f'({current.lasted()})'}", file=sys.stderr, flush=True)
            due = float("inf") if repeat is None else now + repeat
