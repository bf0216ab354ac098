"""A command that works in a fork of this process, while this one shows how far it is."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn

from titan_core.toolkit.status import StatusLine, phase
from titan_simulate.engine.forks import RemoteError, begin, opened, received

REPEAT_SECONDS = 10.0
"""How often a line says how far the command is, if the output is not a terminal."""

Report = Callable[[str], None]
"""Receives how far a command is, in words."""


def print_from_fork(command: Callable[[Report], int], name: str) -> int:
    """Call ``command`` in a fork of this process, print here what it prints there, and return its exit status. Here, because
    a fork ends without the interpreter, which would report a closed pipe or a full disk.

    Meanwhile, ``name`` and what the command has reported last are shown. An interrupt (Ctrl-C) raises KeyboardInterrupt in
    the command, which may still print and return a status. A second one ends it at once, with all that it has forked.

    Raises:
        KeyboardInterrupt: the command was interrupted, and did not handle that.
        Exception: the exception that ``command`` raised.
    """
    reports, theirs = Pipe(duplex=False)
    pipe, child = begin(partial(_printed, command, theirs))
    theirs.close()
    latest = [""]
    with reports, _forwarded_interrupts(child) as interrupts:
        try:
            # Only now, because a fork should have one thread.
            with StatusLine(), phase(name, lambda: latest[0], repeat_seconds=REPEAT_SECONDS):
                _follow(pipe, reports, latest)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            answer = received(pipe, child)
        try:
            status, text = opened(answer)
        except RemoteError:
            if interrupts:
                raise KeyboardInterrupt from None
            raise
    print(text, end="")
    return int(status)


def _follow(pipe: Connection, reports: Connection, latest: list[str]) -> None:
    """Keep the last report until there is an answer."""
    waiting = [pipe, reports]
    while True:
        ready = wait(waiting)
        if reports in ready:
            try:
                latest[0] = reports.recv()
            except EOFError:
                waiting.remove(reports)
        elif pipe in ready:
            return


@contextlib.contextmanager
def _forwarded_interrupts(child: int) -> Iterator[list[int]]:
    """Within the ``with`` block, the first SIGINT asks ``child`` to end, and the second one ends it. Yields those received.

    The child itself ignores SIGINT, which a terminal sends to all processes: it would receive some twice.
    """
    found: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        found.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM if len(found) == 1 else signal.SIGKILL)

    handles = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    before: Any = signal.signal(signal.SIGINT, forward) if handles else None
    try:
        yield found
    finally:
        if handles:
            signal.signal(signal.SIGINT, before)


def _printed(command: Callable[[Report], int], reports: Connection) -> tuple[int, str]:
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = command(reports.send)
    return status, out.getvalue()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
