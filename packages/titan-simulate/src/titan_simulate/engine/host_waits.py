"""Detects where the host waits for the device, which idles the device until the host has caught up."""

from __future__ import annotations

import ctypes
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titan_simulate.engine.stub_libraries import runtime

_OWN = str(Path(__file__).parents[1])


class HostSync(RuntimeError):
    """The host waits for the device in a step, outside the places where it may."""


@dataclass(frozen=True)
class HostWait:
    """A place where the host waits."""

    what: str
    where: str
    """``file:line in function``: the innermost line that is not torch's."""
    step: int
    """0 before the first step."""


class HostWaits:
    """Raises if the host waits while :attr:`forbidden`; records the wait otherwise."""

    def __init__(self) -> None:
        self.forbidden = False
        self.step = 0
        self.found: list[HostWait] = []
        self.error: HostSync | None = None
        """The error that was raised. What reaches the caller may be another one that it led to."""
        self.observer: Callable[[], None] = lambda: None
        """Called after each wait."""
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(self._on_wait)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also detect the waits of streams and events, within the ``with`` block."""
        runtime().titan_on_wait(self._callback)
        try:
            yield
        finally:
            runtime().titan_on_wait(None)

    def begin_step(self, step: int) -> None:
        """Note that ``step`` begins. Events of earlier steps may be waited for: the device has work of this one."""
        self.step = step
        runtime().titan_begin_step(ctypes.c_long(step))

    def wait(self, what: str) -> None:
        """Record that the host waits here.

        Raises:
            HostSync: it must not.
        """
        found = HostWait(what, caller(), self.step)
        self.found.append(found)
        if self.forbidden:
            self.error = HostSync(f"the host waits for the device in step {found.step}: {found.what}, at {found.where}")
            raise self.error
        self.observer()

    def _on_wait(self, what: bytes) -> int:
        # Called from C, through which no exception passes: the stub returns an error, which torch raises.
        try:
            self.wait(what.decode())
        except HostSync:
            return 1
        return 0


def caller() -> str:
    """Return the innermost line of the stack that belongs neither to torch nor to this package."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        if not (file.startswith((_OWN, "<")) or "/torch/" in file or "/contextlib.py" in file or "/ctypes/" in file):
            return f"{_short(file)}:{line} in {frame.f_code.co_qualname}"
    return "torch's own code"


def _short(file: str) -> str:
    parts = Path(file).parts
    for number, part in enumerate(parts):
        if part.startswith("titan_"):
            return "/".join(parts[number:])
    return "/".join(parts[-3:])
