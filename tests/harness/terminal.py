"""A terminal to run programs in: a pseudo-terminal, and what a person would see on its screen."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Sequence

_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\r\n\x08])|([^\x1b\r\n\x08]+)")


class Screen:
    """The rows of a terminal that never scrolls."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = [""]
        self.cursor_is_visible = True
        self.colors: set[str] = set()
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        """Interpret what a program wrote."""
        for numbers, command, control, plain in _TOKEN.findall(text):
            if command == "K":
                self._erase(numbers)
            elif command == "A":
                self._row -= int(numbers or 1)
            elif command == "G":
                self._column = int(numbers or 1) - 1
            elif command == "m":
                self.colors.add(numbers)
            elif command in "hl" and numbers == "?25":
                self.cursor_is_visible = command == "h"
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._next_row()
            for character in plain:
                if self._column == self.columns:
                    self._next_row()
                    self._column = 0
                row = self.rows[self._row].ljust(self._column)
                self.rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
                self._column += 1

    def _erase(self, numbers: str) -> None:
        row = self.rows[self._row]
        self.rows[self._row] = "" if numbers == "2" else row[: self._column]

    def _next_row(self) -> None:
        self._row += 1
        if self._row == len(self.rows):
            self.rows.append("")


class Terminal:
    """A program that runs in a terminal of its own."""

    def __init__(self, command: Sequence[str], columns: int = 80, **environment: str) -> None:
        self.written = ""
        self._columns = columns
        # Without variables about terminals, some of which readline sets behind Python's back.
        ours = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "RANK"}
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        gc.disable()  # what earlier tests have left may own threads of C++, which the new process could not join
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which ignores it
            os.execve(command[0], command, {**inherited, "TERM": "xterm-256color", **environment})
        gc.enable()
        self.resize(columns)
        settings = termios.tcgetattr(self._master)
        settings[3] &= ~termios.ECHO  # what a test types is no part of the screen
        termios.tcsetattr(self._master, termios.TCSANOW, settings)

    def resize(self, columns: int) -> None:
        """Change the width, before the program looks at it."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def wait_for(self, text: str) -> None:
        """Return once the program has written ``text``."""
        while text not in self.written:
            assert self._read(), f"the program ended without {text!r}: {self.written!r}"

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def send(self, number: signal.Signals) -> None:
        """Send the program a signal."""
        os.kill(self.pid, number)

    def end(self) -> tuple[int, Screen]:
        """Wait for the end of the program; return its status (negative for a signal) and the screen."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self._master)
        screen = Screen(self._columns)
        screen.feed(self.written)
        return os.waitstatus_to_exitcode(status), screen

    def _read(self) -> bool:
        data = b""
        with contextlib.suppress(OSError):  # how a pseudo-terminal ends on Linux
            data = os.read(self._master, 65536)
        self.written += data.decode(errors="replace")
        return bool(data)


def python(script: str) -> list[str]:
    """Return the command that runs a script."""
    return [sys.executable, "-c", script]
