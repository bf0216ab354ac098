"""What the launcher prints: its own lines, and the output of the ranks that are shown.

A rank on a terminal redraws its last line (a progress bar). The launcher knows what each rank has written, so it can put a
line above, and erase what a rank that was killed left behind.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from titan_core.toolkit.output import write_all
from titan_core.toolkit.status import ERASE, StatusLine
from titan_core.toolkit.text import printable

_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Shown:
    """The ranks whose output is printed."""

    ranks: frozenset[int]
    prefixed: bool = False
    """Whether each line begins with its rank. Without, a rank on a terminal may redraw its last line."""

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks


class Console:
    """Standard output and standard error of the launcher. All methods are safe in any thread."""

    def __init__(self, status: StatusLine | None = None, descriptors: tuple[int, int] = (1, 2)) -> None:
        """
        Args:
            status: a status line to close before anything is printed.
        """
        self._lock = threading.RLock()
        self._status = status
        out, err = descriptors
        self.stdout = self.stderr = Stream(self, err)
        if not os.path.samestat(os.fstat(out), os.fstat(err)):
            self.stdout = Stream(self, out)

    def show_status(self) -> None:
        """Show the phases of this process until something is printed."""
        self.close_status()
        self._status = StatusLine().__enter__()

    def close_status(self) -> None:
        """Show no phases from now on."""
        status, self._status = self._status, None
        if status is not None:
            status.close()

    @property
    def shows_status(self) -> bool:
        """Whether nothing was printed since the status line appeared."""
        return self._status is not None

    def say(self, line: str) -> None:
        """Print a line of the launcher on standard error."""
        self.stderr.line(printable(f"titan: {line}").encode())

    def close(self) -> None:
        """End the last line of the ranks."""
        self.close_status()
        for stream in {self.stdout, self.stderr}:
            stream.end_line()


class Stream:
    """A file or a terminal that several ranks and the launcher write to."""

    def __init__(self, console: Console, descriptor: int) -> None:
        self._console, self.descriptor = console, descriptor
        self.is_terminal = os.isatty(descriptor)
        self._row = b""  # the last byte of an incomplete line, after \r if it is redrawn

    def raw(self, data: bytes) -> None:
        """Write bytes of a rank as they are. Text that C++ writes on the row of a progress bar replaces the bar."""
        with self._console._lock:  # noqa: SLF001 - one lock for both streams of a console
            if self._row.endswith(b"\r") and not data.startswith((b"\r", b"\x1b")):
                self.end_line()
            self._write(data)
            row = data.rpartition(b"\n")[2] if b"\n" in data else self._row + data
            self._row = b"\r" * (b"\r" in row) + row[-1:]

    def line(self, line: bytes) -> None:
        """Write a whole line, above a line that is being redrawn."""
        with self._console._lock:  # noqa: SLF001
            self.end_line()
            self._write(line + b"\n")

    def end_line(self) -> None:
        """Erase an incomplete line if it is redrawn, and end it if it is text."""
        with self._console._lock:  # noqa: SLF001
            if not self._row:
                return
            self._write(f"{ERASE}{_SHOW_CURSOR}".encode() if self.is_terminal and b"\r" in self._row else b"\n")
            self._row = b""

    def _write(self, data: bytes) -> None:
        self._console.close_status()
        write_all(self.descriptor, data)
