"""The output of the ranks: a log for each, and the console for those that are shown.

A rank writes to a pipe, or to a pseudo-terminal if it is shown on a terminal, and one thread copies what arrives: stdout and
stderr of a rank become one file, whatever wrote to them (Python, C++ or NCCL).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import selectors
import termios
import threading
import time
import tty
from collections.abc import Collection, Iterable
from pathlib import Path

from titan_core.api import UserError
from titan_core.toolkit.output import closed_output
from titan_core.toolkit.own_files import no_link
from titan_launch.terminal.console import Console, Shown, Stream

_CONTROL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
"""Colors, movements of the cursor and titles of windows."""
_POLL_SECONDS = 0.1
_REST_SECONDS = 2.0
"""How long to copy after the end of the ranks, whose own children may still write."""
_CHUNK = 65536


class RankLogs:
    """Connects the streams of the ranks of each attempt."""

    def __init__(self, folder: Path, where: str, console: Console, shown: Shown) -> None:
        """
        Args:
            folder: for the logs, ``rank-N.log``. Those of an earlier attempt move to ``attempt-N/rank-N.log``.
            where: the option or key that names the folder.

        Raises:
            UserError: the folder cannot be written.
        """
        self.folder, self._console, self._shown = folder, console, shown
        self._logs: list[_Log] = []
        self._channels: list[_Channel] = []
        self._copier: _Copier | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            why = f"{folder} cannot be written: {error.strerror or error}"
            raise UserError.one(where, why, "choose another folder") from None

    def log_of(self, rank: int) -> Path:
        """Return the log of a rank's current attempt."""
        return self.folder / f"rank-{rank}.log"

    def shows(self, ranks: Iterable[int]) -> bool:
        """Return whether one of ``ranks`` is printed."""
        return any(rank in self._shown for rank in ranks)

    def streams(self, ranks: Collection[int]) -> dict[int, tuple[int, int]]:
        """Return the descriptors of stdout and stderr for each rank of an attempt, open until :meth:`begin_attempt`."""
        self.end_attempt()
        self.set_aside(ranks)
        found: dict[int, tuple[int, int]] = {}
        for rank in ranks:
            log = _Log(self.log_of(rank), self._console)
            self._logs.append(log)
            out, err = (self._console.stdout, self._console.stderr) if rank in self._shown else (None, None)
            prefix = f"[rank {rank}] ".encode() if self._shown.prefixed else b""
            channels = [_Channel(log, stream, prefix) for stream in dict.fromkeys((out, err))]
            found[rank] = channels[0].writer, channels[-1].writer
            self._channels += channels
        return found

    def begin_attempt(self) -> None:
        """Start to copy. The ranks have been started."""
        for channel in self._channels:
            channel.close_writer()
        self._copier = _Copier(self._channels)
        self._copier.start()

    def end_attempt(self) -> None:
        """Copy what the ranks have written, and close their logs. Does not wait for processes that outlive a rank."""
        if self._copier is not None:
            self._copier.end()
        for channel in self._channels:
            channel.close()
        for log in self._logs:
            log.close()
        self._copier, self._channels, self._logs = None, [], []

    def set_aside(self, ranks: Iterable[int]) -> dict[str, str]:
        """Move the logs of an earlier attempt to a folder of their own; return their old and new paths. What ranks still
        write is kept."""
        logs = [log for rank in ranks if (log := self.log_of(rank)).exists()]
        attempts = (int(found[1]) for path in self.folder.iterdir() if (found := re.fullmatch(r"attempt-(\d+)", path.name)))
        # Launchers on other machines move the logs of their ranks to the same folders.
        used = (number for number in attempts if any((self._attempt(number) / log.name).exists() for log in logs))
        target = self._attempt(1 + max(used, default=0))
        for log in logs:
            target.mkdir(exist_ok=True)
            log.rename(target / log.name)
        return {str(log): str(target / log.name) for log in logs}

    def _attempt(self, number: int) -> Path:
        return self.folder / f"attempt-{number}"


class _Log:
    """The log of one rank. If it cannot be written, the job continues, and the log says what is missing."""

    def __init__(self, path: Path, console: Console) -> None:
        self._path, self._console = path, console
        self._descriptor = no_link(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._lost = 0

    def write(self, text: bytes) -> None:
        note = f"[titan: {self._lost} bytes could not be written here]\n".encode() if self._lost else b""
        try:
            os.write(self._descriptor, note + text)
        except OSError as error:
            if not self._lost:
                self._console.say(f"warning: {self._path} cannot be written: {error.strerror}; the job continues")
            self._lost += len(text)
        else:
            self._lost = 0

    def close(self) -> None:
        os.close(self._descriptor)


class _Channel:
    """A stream of a rank, or both."""

    def __init__(self, log: _Log, stream: Stream | None, prefix: bytes) -> None:
        self._log, self._stream, self._prefix = log, stream, prefix
        self.is_terminal = stream is not None and stream.is_terminal and not prefix
        self.reader, self.writer = pty.openpty() if self.is_terminal else os.pipe()
        if self.is_terminal:
            tty.setraw(self.writer)
            self.fit()
        self._rest = b""
        self._is_closed = False

    def fit(self) -> None:
        """Give the rank's terminal the size of ours."""
        if self.is_terminal and self._stream is not None:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._stream.descriptor, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self.reader, termios.TIOCSWINSZ, size)

    def copy(self) -> bool:
        """Copy what has arrived; return whether the stream is open."""
        try:
            data = os.read(self.reader, _CHUNK)
        except OSError:  # the way in which a pseudo-terminal ends on Linux
            data = b""
        if not data:
            return False
        if self._stream is not None and not self._prefix:
            self._stream.raw(data)
            self._note_closed(self._stream)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = _last_frame(rest, keep=True)
        self._write([_last_frame(line) for line in lines])
        return True

    def close_writer(self) -> None:
        os.close(self.writer)

    def close(self) -> None:
        """Write a last line that has no end, unless it is the remains of a progress bar."""
        if self._rest and not self._rest.endswith(b"\r"):
            self._write([_last_frame(self._rest)])
        os.close(self.reader)

    def _write(self, lines: Collection[bytes]) -> None:
        if lines:
            self._log.write(b"".join(line + b"\n" for line in lines))
        if self._stream is not None and self._prefix:
            for line in lines:
                self._stream.line(self._prefix + line)
            self._note_closed(self._stream)

    def _note_closed(self, stream: Stream) -> None:
        """Say once in the log that the stream is closed, and with it what the rank has printed."""
        why = closed_output().get(stream.descriptor)
        if why is not None and not self._is_closed:
            self._is_closed = True
            self._log.write(f"[titan: {why}; the job continues without it]\n".encode())


class _Copier(threading.Thread):
    """Copies the streams of all ranks of an attempt."""

    def __init__(self, channels: Iterable[_Channel]) -> None:
        super().__init__(name="rank output", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._until = float("inf")
        self._channels = list(channels)
        for channel in self._channels:
            self._selector.register(channel.reader, selectors.EVENT_READ, channel)

    def run(self) -> None:
        while self._selector.get_map() and time.monotonic() < self._until:
            ready = self._selector.select(_POLL_SECONDS)
            for key, _ in ready:
                if not key.data.copy():
                    self._selector.unregister(key.fileobj)
            if not ready:
                if self._until < float("inf"):
                    return
                for channel in self._channels:
                    channel.fit()

    def end(self) -> None:
        """Return once everything that the ranks have written is copied."""
        self._until = time.monotonic() + _REST_SECONDS
        self.join()
        self._selector.close()


def _last_frame(line: bytes, keep: bool = False) -> bytes:
    """Return what a terminal shows of a line that was redrawn.

    Args:
        keep: the line is incomplete, so keep its control characters.
    """
    shown = line[line.rstrip(b"\r").rfind(b"\r") + 1 :]
    return shown if keep else _CONTROL.sub(b"", shown.rstrip(b"\r"))
