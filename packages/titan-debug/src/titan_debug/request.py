"""Asking a running job for something, by a file that it looks at."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_debug.whole_file import whole_file

REQUEST_FILE = "requested"


@dataclass(frozen=True)
class Request:
    """Who asks, and why."""

    why: str
    rank: int | None = None
    """The rank that asks; ``None`` for a person."""
    time: float = 0.0


def ask(folder: Path, why: str, rank: int | None = None) -> float:
    """Ask for what is written into ``folder``; returns when, in seconds since the epoch.

    Raises:
        OSError: the file cannot be written.
    """
    request = Request(why, rank, time.time())
    with whole_file(folder / REQUEST_FILE) as file:
        file.write_text(json.dumps(asdict(request)))
    return request.time


class Requests:
    """Notices requests that come after it was made: what an earlier attempt has left is none. Clocks do not matter."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / REQUEST_FILE
        self._seen = version(self._file)

    def new(self) -> Request | None:
        """The request that has come since the last look, if any."""
        now = version(self._file)
        if now is None or now == self._seen:
            return None
        self._seen = now
        try:
            read = json.loads(self._file.read_text(encoding="utf-8"))
            return Request(str(read["why"]), read["rank"], float(read["time"]))
        except (OSError, ValueError, KeyError, TypeError):  # touched by hand, or gone again
            return Request(f"{REQUEST_FILE} was touched")

    def ask(self, why: str, rank: int) -> None:
        """Ask the other ranks, unless somebody has just done so.

        Raises:
            OSError: the file cannot be written.
        """
        if version(self._file) == self._seen:
            ask(self._file.parent, why, rank)
            self._seen = version(self._file)


def version(file: Path) -> tuple[int, int] | None:
    """Another one whenever ``file`` is written; ``None`` where there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
