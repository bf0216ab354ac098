"""The files of a crash report: one of each rank that failed, read back by the few ranks that write the page."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict
from pathlib import Path

from titan_debug.crash.page import RankCrash
from titan_debug.whole_file import whole_file

log = logging.getLogger(__name__)

MOST_READ = 256
"""As many files of failures of ranks' own are read, and of those that follow from them; further ranks are only counted."""
QUIET = 1.0
"""Seconds. Ranks that fail within so many of each other leave the page to one of them, and it looks for further files until
none has come for as long."""

_NAME = re.compile(r"rank-(\d+)(-follows)?\.json")
_Found = tuple[bool, int, os.DirEntry[str]]
"""Whether it follows from another rank's failure, and the rank."""


class CrashFiles:
    """Those of one attempt at a run, as one rank knows them."""

    def __init__(self, folder: Path, attempt: float, world_size: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._world_size = world_size
        self._seen: set[tuple[str, int, int]] = set()
        self._read: dict[int, RankCrash] = {}
        self.unread: set[int] = set()
        """Ranks whose files are there, beyond those that are read."""

    @property
    def crashes(self) -> list[RankCrash]:
        """What has been read so far."""
        return list(self._read.values())

    @property
    def complete(self) -> bool:
        """Whether every rank has reported."""
        return len(self._read) + len(self.unread) >= self._world_size

    def add(self, own: RankCrash) -> None:
        """Write this rank's.

        Raises:
            OSError: it cannot be written.
        """
        with whole_file(self._file(own.rank, own.follows)) as file:
            file.write_text(json.dumps(asdict(own), indent=1), encoding="utf-8")
        self._file(own.rank, not own.follows).unlink(missing_ok=True)  # an earlier attempt's

    def writes_the_page(self, own: RankCrash) -> bool:
        """Whether that is up to this rank, whose file is there: no lower rank has failed in the same way just before. So
        one of the failures of ranks' own writes it, and one of those that follow; of thousands at once, a handful."""
        since = self._file(own.rank, own.follows).stat().st_mtime - QUIET
        lower = (entry for follows, rank, entry in self._found() if follows == own.follows and rank < own.rank)
        return not any((found := _stat(entry)) is not None and found.st_mtime >= since for entry in lower)

    def look(self) -> bool:
        """Read what has been added since the last look; whether there is anything.

        What an earlier attempt has left is not of this one, and what cannot be read is not there.
        """
        before = len(self._read) + len(self.unread)
        counts = [sum(one.follows is follows for one in self._read.values()) for follows in (False, True)]
        stated = [(follows, rank, entry, found) for follows, rank, entry in self._found() if (found := _stat(entry))]
        for follows, rank, entry, found in sorted(stated, key=lambda one: (one[0], one[3].st_mtime_ns)):  # causes first
            version = (entry.name, found.st_mtime_ns, found.st_ino)
            if version in self._seen:
                continue
            self._seen.add(version)
            if counts[follows] >= MOST_READ:
                self.unread.add(rank)
                continue
            crash = _crash(Path(entry.path))
            if crash is not None and crash.attempt == self._attempt:
                self._read[rank] = crash
                counts[follows] += 1
        return len(self._read) + len(self.unread) > before

    def _file(self, rank: int, follows: bool) -> Path:
        """Its name says what kind of failure it is, so that others need not open it."""
        return self._folder / f"rank-{rank}{'-follows' if follows else ''}.json"

    def _found(self) -> list[_Found]:
        """What is there, by rank."""
        with os.scandir(self._folder) as entries:
            named = [(found, entry) for entry in entries if (found := _NAME.fullmatch(entry.name))]
        ranked = [(found[2] is not None, int(found[1]), entry) for found, entry in named]
        return sorted((one for one in ranked if one[1] < self._world_size), key=lambda one: one[1])


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except FileNotFoundError:  # an earlier attempt's, which its rank has just replaced
        return None


def _crash(file: Path) -> RankCrash | None:
    try:
        return RankCrash(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is left out of the crash report: %s", file, error)
        return None
