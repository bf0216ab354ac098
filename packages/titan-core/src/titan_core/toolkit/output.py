"""Standard output and standard error of a command, which may be closed at any moment: by ``titan train | head -1``, by a
terminal that vanishes, by ``>&-``, or by a full disk. Training continues without them, every other command ends.

The command writes to streams of :mod:`io` over the same descriptors. Whatever prints meets the same rule that way: a plugin,
``rich``, a progress bar or a logger, each of which would otherwise take the failed write for a failure of its own.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from titan_core.toolkit.errors import Interrupted

_NAMES = {1: "standard output", 2: "standard error"}
_absent: set[int] = set()  # descriptors that were closed from the start
_closed: dict[int, OSError] = {}  # by descriptor: why a write to it failed
_continues = False


class OutputClosed(Interrupted):
    """Standard output or standard error cannot be written, and the command has nothing else to do."""


class _Descriptor(io.FileIO):
    """One of the two. Once a write has failed, all further ones are discarded, unless they end the command."""

    def write(self, data: object) -> int:
        with memoryview(data).cast("B") as view:  # type: ignore[arg-type] # typeshed names no type of buffers here
            write_all(self.fileno(), view)
            require_output()
            return view.nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Let the rule hold within the block: :class:`OutputClosed` ends it, unless it calls :func:`continue_without`.

    Streams that an application or a test has put in the place of the interpreter's stay as they are.
    """
    global _continues
    _closed.clear()
    _absent.clear()
    _continues = False
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # a file that is opened later would become the output
        os.set_inheritable(free, True)
        if free in _NAMES:
            _absent.add(free)
    os.close(free)
    before = sys.stdout, sys.stderr
    _flush(*before)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, sys.stderr)
    try:
        yield
    finally:
        _continues = True
        _flush(sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = before


def _flush(*streams: TextIO | None) -> None:
    for stream in streams:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, one whose file is gone, or a closed one
            stream.flush()  # type: ignore[union-attr]


def _stream(descriptor: int, given: TextIO | None) -> TextIO:
    raw = _Descriptor(descriptor, "wb", closefd=False)
    unbuffered = getattr(given, "write_through", False)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # as `python -u` has it
        encoding=None if given is None else given.encoding,
        errors="backslashreplace",  # a name with bytes or letters that this locale lacks can be printed
        line_buffering=descriptor == 2 or raw.isatty(),
        write_through=unbuffered,
    )


def continue_without() -> None:
    """Let this command continue if its output is closed: it has more to do than to print, or reports its failure."""
    global _continues
    _continues = True


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write ``data`` to standard output or standard error, or note that it cannot be written. Safe in any thread.

    It waits while a pipe that does not block is full: a process that shares the pipe may have set that.
    """
    try:
        if descriptor in _absent:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                select.select((), (descriptor,), ())
    except OSError as error:
        _give_up(descriptor, error)


def _give_up(descriptor: int, error: OSError) -> None:
    """Note that standard output or standard error cannot be written. From now on it leads nowhere, for libraries of C++ and
    processes started later as well."""
    if descriptor in _NAMES and descriptor not in _closed:
        _closed[descriptor] = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def require_output() -> None:
    """End a command whose output is closed, in the main thread.

    Raises:
        OutputClosed: see :func:`standard_streams`.
    """
    if _closed and not _continues and threading.current_thread() is threading.main_thread():
        raise OutputClosed(*_closed.values())


def closed_output() -> dict[int, str]:
    """Return which writes have failed and why, in one line each, by descriptor."""
    return {number: f"{_NAMES[number]} cannot be written: {error.strerror or error}" for number, error in [*_closed.items()]}
