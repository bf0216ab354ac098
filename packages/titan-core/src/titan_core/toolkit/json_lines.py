"""Files with one JSON object per line. A process that is killed at any instant leaves them readable."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from titan_core.api import UserError
from titan_core.toolkit.files import open_file
from titan_core.toolkit.own_files import no_link
from titan_core.toolkit.plain_json import TooDeep, plain_json

log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 16 * 2**20
"""Maximum total bytes of lines that wait for free disk space; older lines are dropped and counted."""
LONGEST_LINE = 2**20
"""Bytes of the longest line that is read."""
_BLOCK = 64 * 1024


class LineFile:
    """Appends JSON objects to a file, one per line. Each line is passed to the operating system when it is written, and only
    the last line of the file can ever be incomplete.

    Lines that cannot be written (a full disk, an unavailable network file system) are kept, reported once, and retried with
    the next line. If another file is put in the place of this one, or it is removed, that is reported too, and further lines
    are appended to what is there. Write errors never raise, because a log is not worth a run. Any thread may append.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._failing = False
        self._lost = 0
        self._lock = threading.Lock()

    def append(self, record: Mapping[str, Any]) -> bool:
        """Append ``record`` after any waiting lines. Return whether all of them are now in the file."""
        line = (json.dumps(record) + "\n").encode()
        if rb"\ud" in line:  # maybe half a surrogate pair, such as a byte of a file's name that this locale lacks
            line = _without_halves(json.dumps(record, ensure_ascii=False) + "\n")
        with self._lock:
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            while self._waiting_bytes > MOST_WAITING_BYTES:
                self._waiting_bytes -= len(self._waiting.popleft())
                self._lost += 1
            self._write_waiting()
            return not self._waiting

    def close(self) -> None:
        """Try a last time to write waiting lines, and close the file."""
        with self._lock:
            if self._waiting:
                self._write_waiting()
            if self._waiting or self._lost:
                log.error("%s lacks %d lines that could not be written", self._path, len(self._waiting) + self._lost)
            self._waiting.clear()
            self._close_descriptor()

    def _write_waiting(self) -> None:
        try:
            if self._descriptor is not None and not _is_at(self._descriptor, self._path):
                log.warning(
                    "%s was replaced or removed; further lines are appended to the file that is there now", self._path
                )
                self._close_descriptor()
            if self._descriptor is None:
                self._descriptor = _open_to_append(self._path)
            while self._waiting:
                line = self._waiting[0]
                if _write(self._descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError as error:
            self._close_descriptor()  # a partial line is truncated when the file is reopened
            if not self._failing:
                log.warning("%s cannot be written: %s; lines are kept and retried", self._path, error.strerror or error)
            self._failing = True
            return
        if self._failing:
            lost = f"{self._lost} lines were lost" if self._lost else "no line was lost"
            log.warning("%s can be written again; %s", self._path, lost)
            self._failing, self._lost = False, 0

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the write failure was already reported
                os.close(descriptor)


def _without_halves(text: str) -> bytes:
    """Return ``text`` in UTF-8: bytes of names as they are, and other halves of surrogate pairs replaced."""
    try:
        return text.encode(errors="surrogateescape").decode(errors="replace").encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _open_to_append(path: Path) -> int:
    """Open ``path``, and truncate an incomplete last line that a killed process or a full disk left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = no_link(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = end = os.fstat(descriptor).st_size
        while end > 0:
            begin = max(0, end - _BLOCK)
            newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            os.ftruncate(descriptor, end)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_write = os.write
"""Replaced in tests to simulate a full disk."""


def complete_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield the length of each complete line from here on, and the line, or ``None`` if it is longer than
    :data:`LONGEST_LINE`: no run writes such a line, and reading it might take all memory. An incomplete last line is not
    read."""
    while line := file.readline(LONGEST_LINE):
        if line.endswith(b"\n"):
            yield len(line), line
            continue
        length = len(line)
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE)
            length += len(line)
        if not line:
            return  # still being written, or left incomplete by a killed process
        yield length, None


def parsed(line: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object on a line of :func:`complete_lines`; ``None`` if :func:`record_on` refuses it."""
    try:
        return record_on(line) if line is not None else None
    except ValueError:
        return None


def record_on(line: bytes) -> dict[str, Any]:
    """Return the JSON object on a line of :func:`complete_lines`.

    Raises:
        ValueError: there is none, or one that cannot be used (:func:`~titan_core.toolkit.plain_json.plain_json`).
    """
    try:
        record = plain_json(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        record = None
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    # Without interning, each line would hold its own copies of the keys, which take more memory than the values.
    return {sys.intern(key): value for key, value in record.items()}


def records_of(file: Path, skipped: Callable[[int], None] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line of ``file`` and the object on it; nothing if the file does not exist. An incomplete last
    line is skipped. A link out of the file's folder is not followed.

    Args:
        skipped: receives the numbers of lines that are too long, or nested too deeply, to be read. Without it they count as
            damaged.

    Raises:
        UserError: the file cannot be read, or a line is damaged.
    """
    try:
        opened = open_file(file, inside=file.parent)  # binary, because an incomplete line may end within a character
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError.one(str(file), f"cannot be read: {error.strerror}", "restore the file") from None
    with opened as lines:
        for number, (_, line) in enumerate(complete_lines(lines), 1):
            try:
                if line is None:
                    raise TooDeep(f"is longer than {LONGEST_LINE} bytes")
                record = record_on(line)
            except ValueError as error:
                if skipped is None or not isinstance(error, TooDeep):
                    raise UserError.one(f"{file}:{number}", str(error), "remove this line, or restore the file") from None
                skipped(number)
            else:
                yield number, record


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects in ``file``, or none if it does not exist. An incomplete last line is skipped.

    Raises:
        UserError: any other line is damaged.
    """
    return [record for _, record in records_of(file)]
