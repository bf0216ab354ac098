"""The last line of a terminal: the progress of the run, or what the process is doing while a person waits.

The line is one row and never hides the cursor, so a process that is killed leaves a terminal that works. Whatever else the
process prints appears above the line; a progress bar of a library (tqdm) appears in it.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from titan_core.toolkit.status import ERASE, RunProgress, current_phase, current_progress, hide_all, phase
from titan_core.toolkit.text import printable, say

if TYPE_CHECKING:  # rich is imported once there is a terminal
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

PLAIN_SECONDS = 2.0
"""Without a terminal, a phase that lasts longer is printed."""
_REFRESH_SECONDS = 0.1
_WINDOW_SECONDS = 60.0
"""The remaining time is estimated from the steps of this time."""
_input = builtins.input


class StatusLine:
    """Shows the phases and the progress of this process within the ``with`` block. Inside of another status line, it does
    nothing. If neither stderr nor stdout is a terminal, each phase that lasts prints a line to stderr."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._is_shown = False
        self._drawn = ""
        self._pauses = False
        self._announced: phase | None = None
        self._next_line = 0.0
        self._terminal: Console | None = None
        self._streams: dict[str, _Above] = {}
        self._on_term: Any = None
        self._pace: _Pace | None = None

    def __enter__(self) -> StatusLine:
        global _shown
        if _shown is not None:
            return self
        _shown, self._is_shown = self, True
        hide_all(False)
        self._terminal = _terminal()
        if self._terminal is not None:
            for name in ("stdout", "stderr"):
                if (stream := getattr(sys, name)).isatty():
                    self._streams[name] = _Above(stream, self)
                    setattr(sys, name, self._streams[name])
            builtins.input = self._ask
            if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self._on_term = self._terminate
                signal.signal(signal.SIGTERM, self._on_term)
        self._thread = threading.Thread(target=self._watch, name="status line", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the line. Safe to call more than once, and from any thread."""
        global _shown
        if not self._is_shown:
            return
        _shown, self._is_shown = None, False
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._terminal is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._draw("")
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.under)
            stream.end()
        if builtins.input == self._ask:
            builtins.input = _input
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and self._on_term is not None and signal.getsignal(signal.SIGTERM) is self._on_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def is_shown(self) -> bool:
        """Whether the line is on a terminal now."""
        return self._is_shown and self._terminal is not None

    def print_above(self, stream: TextIO, text: str) -> None:
        """Write to a stream on the terminal, and draw the line below. Does not draw it on a row that has text: a person may
        be typing an answer there."""
        with self._lock:
            line = self._drawn
            self._draw("")
            stream.write(text)
            stream.flush()
            self._pauses = not text.endswith("\n")
            if current_phase() or current_progress():
                self._draw(line)  # which the thread will update: rendering takes milliseconds

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal or the file is closed: nobody watches
            while not self._over.wait(_REFRESH_SECONDS):
                if self._terminal is None:
                    self._print_phase()
                else:
                    self._draw(self._line(self._terminal))

    def _draw(self, line: str) -> None:
        assert self._terminal is not None
        with self._lock:
            if line == self._drawn or (line and self._pauses):
                return
            file = self._terminal.file
            encoding = self._terminal.encoding
            shown = line.encode(encoding, "replace").decode(encoding)
            # The cursor stays at the begin of the row: what the process prints past us then replaces the line.
            file.write(f"\r{shown}\x1b[K\r" if line else ERASE)
            file.flush()
            self._drawn = line

    def _line(self, terminal: Console) -> str:
        """Return the line, with its colors."""
        now, current, progress = time.monotonic(), current_phase(), current_progress()
        nested = next((stream.unfinished for stream in self._streams.values() if stream.unfinished), "")
        doing = "" if current is None else printable(f"{current} {_seconds(now - current.began)}")
        doing = f"{doing} {nested}".strip()
        if progress is None and not doing:
            return ""
        width = terminal.width - 1  # the last column would wrap
        if progress is not None and (self._pace is None or self._pace.progress is not progress):
            self._pace = _Pace(progress, now)
        with terminal.capture() as capture:
            if progress is None or self._pace is None:
                terminal.print(_cut(doing, width), end="")
            else:
                terminal.print(_bar(progress, doing or self._pace.times(now), width), width=width)
        return capture.get().rstrip("\n")

    def _print_phase(self) -> None:
        current, now = current_phase(), time.monotonic()
        if current is not self._announced:
            self._announced, self._next_line = current, now if current is None else current.began + PLAIN_SECONDS
        if current is None or now < self._next_line:
            return
        once = current.repeat_seconds is None
        say(f"titan: {current}{' ...' if once else f' ({_seconds(now - current.began)})'}", file=sys.stderr, flush=True)
        self._next_line = float("inf") if current.repeat_seconds is None else now + current.repeat_seconds

    def _ask(self, prompt: object = "", /) -> str:
        """``input()``, for a debugger among others. Python writes its prompt past us."""
        with self._lock:
            self._draw("")
            self._pauses = True
        try:
            return _input(prompt)
        finally:
            self._pauses = False

    def _terminate(self, number: int, frame: object) -> None:
        """Erase the line before SIGTERM ends the process."""
        assert self._terminal is not None
        with contextlib.suppress(OSError):  # it is closed
            os.write(self._terminal.file.fileno(), ERASE.encode())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def leave(self) -> None:
        """Give the streams back without the lock, which another thread may have held when this process was forked."""
        self._is_shown = False
        for name, stream in self._streams.items():
            setattr(sys, name, stream.under)


class _Pace:
    """Estimates the remaining time of a run from the steps of the last minute."""

    def __init__(self, progress: RunProgress, now: float) -> None:
        self.progress, self.began, self._start = progress, now, progress.done
        self._seen: deque[tuple[float, int]] = deque()

    def left(self, now: float) -> float | None:
        """Return the remaining seconds; ``None`` until two steps are done, because the first one is slower."""
        seen, done = self._seen, self.progress.done
        if done != (seen[-1][1] if seen else self._start):
            seen.append((now, done))
        while len(seen) > 2 and seen[1][0] < now - _WINDOW_SECONDS:
            seen.popleft()
        if len(seen) < 2:
            return None
        (began, first), (ended, last) = seen[0], seen[-1]
        return max(0.0, (self.progress.total - last) * (ended - began) / (last - first) - (now - ended))

    def times(self, now: float) -> str:
        """Return the time that has passed, and the estimate of the rest."""
        left = self.left(now)
        return _clock(now - self.began) + ("" if left is None else f", {_clock(left)} left")


class _Above:
    """Stands for a stream of the terminal: prints whole lines above the status line."""

    def __init__(self, under: TextIO, line: StatusLine) -> None:
        self.under, self._line = under, line
        self.unfinished = ""
        """What follows the last line, such as a frame of a progress bar."""
        self._is_redrawn = False

    def write(self, text: str) -> int:
        if not self._line.is_shown:
            return self.under.write(text)
        *lines, rest = (self.unfinished + text).split("\n")
        self.unfinished = rest[rest.rstrip("\r").rfind("\r") + 1 :]
        self._is_redrawn = "\r" in rest or (self._is_redrawn and not lines)
        if lines:
            self._line.print_above(self.under, "".join(map(_last_frame, lines)))
        return len(text)

    def flush(self) -> None:
        if self.unfinished and not self._is_redrawn and self._line.is_shown:
            text, self.unfinished = self.unfinished, ""
            self._line.print_above(self.under, text)
        self.under.flush()

    def end(self) -> None:
        """Write text that has no end of line. The frame of a bar whose code has failed is not left behind."""
        if not self._is_redrawn:
            self.under.write(self.unfinished)
        self.under.flush()
        self.unfinished = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.under, name)


_shown: StatusLine | None = None


def _leave_in_child() -> None:
    global _shown
    if _shown is not None:
        _shown.leave()
        _shown = None


os.register_at_fork(after_in_child=_leave_in_child)


def _bar(progress: RunProgress, end: str, width: int) -> Table:
    """Return the bar in one row that ends with ``end``. A narrow terminal shows less."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = ProgressBar(progress.total, progress.done, complete_style="cyan", finished_style="green")
    count = f"{progress.done:>{len(str(progress.total))}}/{progress.total}"
    cells: list[RenderableType] = [bar, count, _cut(end, max(10, width // 2))]
    if width >= 50:
        cells.insert(2, f"loss {progress.loss}")
    if width >= 70:
        cells.insert(0, printable(progress.name))
    table = Table.grid(padding=(0, 1), expand=True)
    for cell in cells:
        table.add_column(ratio=1 if cell is bar else None, no_wrap=True)
    table.add_row(*cells)
    return table


def _terminal() -> Console | None:
    """Return the terminal to draw on; ``None`` if there is none, or one that cannot erase a line (``TERM=dumb``)."""
    for stream in (sys.stderr, sys.stdout):
        if stream.isatty():  # rich would also take a file for a terminal, under FORCE_COLOR
            from rich.console import Console

            console = Console(file=stream, highlight=False, markup=False, emoji=False)
            if console.is_interactive:
                return console
    return None


def _last_frame(line: str) -> str:
    """Return what a terminal shows of a line that a progress bar has redrawn."""
    return line.rstrip("\r").rpartition("\r")[2] + "\n"


def _cut(text: str, width: int) -> Text:
    from rich.text import Text

    shown = Text(text, no_wrap=True)
    shown.truncate(width, overflow="crop")
    return shown


def _seconds(seconds: float) -> str:
    return f"{int(seconds)} s" if seconds < 120 else _clock(seconds)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
