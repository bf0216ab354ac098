"""The phase of this process, for people who wait for it. Free of torch, and prints nothing.

The code that works only sets values. A :class:`~titan_core.toolkit.status_line.StatusLine` reads them a few times a second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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


@dataclass
class RunProgress:
    """How far a run is. Its owner assigns the attributes."""

    name: str
    total: int
    done: int
    loss: str = "-"


ERASE = "\r\x1b[2K"
"""Erases the current row of a terminal."""

_MAIN_THREAD = threading.main_thread().ident
_phases: list[phase] = []
finished: deque[tuple[str, float, float]] = deque(maxlen=64)
"""The last phases: name, start and end (``time.monotonic``)."""
_progress: list[RunProgress] = []
_hidden = False


def current_phase() -> phase | None:
    """Return the innermost phase, if any. Safe in any thread."""
    return None if _hidden else next(reversed(_phases), None)


def current_progress() -> RunProgress | None:
    """Return the progress to show, if any."""
    return None if _hidden else next(reversed(_progress), None)


def show_progress(progress: RunProgress) -> None:
    """Show ``progress`` until :func:`hide_progress`."""
    _progress.append(progress)


def hide_progress(progress: RunProgress) -> None:
    """Stop showing ``progress``."""
    if progress in _progress:
        _progress.remove(progress)


@contextmanager
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
