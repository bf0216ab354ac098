"""The files of a crash report: each failed rank writes one, and the few ranks that write the page read them all."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict
from pathlib import Path

from titan_core.toolkit.atomic_write import atomic_write
from titan_debug.crash.page import RankCrash

log = logging.getLogger(__name__)

MOST_READ = 256
"""Largest number of files read of original failures, and as many again of consequential failures. Further ranks are only
counted."""
QUIET = 1.0
"""Seconds. Of ranks that fail within this time, one writes the page. It stops updating the page once no new file has
appeared for this time."""

_NAME = re.compile(r"rank-(\d+)(-follows)?\.json")
_Found = tuple[bool, int, os.DirEntry[str]]
"""Whether the failure follows from another rank's, the rank, and its file."""


class CrashFiles:
    """The crash files of one attempt at a run."""

    def __init__(self, folder: Path, attempt: float, world_size: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._world_size = world_size
        self._seen: set[tuple[str, int, int]] = set()
        self._read: dict[int, RankCrash] = {}
        self.unread: set[int] = set()
        """Ranks whose files exist but exceed the number that is read."""

    @property
    def crashes(self) -> list[RankCrash]:
        """Failures read so far."""
        return list(self._read.values())

    @property
    def complete(self) -> bool:
        """Whether every rank has reported."""
        return len(self._read) + len(self.unread) >= self._world_size

    def add(self, own: RankCrash) -> None:
        """Write this rank's file.

        Raises:
            OSError: the file cannot be written.
        """
        with atomic_write(self._file(own.rank, own.follows)) as file:
            file.write_text(json.dumps(asdict(own), indent=1), encoding="utf-8")
        self._file(own.rank, not own.follows).unlink(missing_ok=True)  # an earlier attempt's

    def writes_the_page(self, own: RankCrash) -> bool:
        """Whether this rank, whose file has been written, should write the page.

        It should unless a lower rank has just failed in the same way. So one rank with an original failure and one with a
        consequential failure write it; if thousands fail at once, a handful do.
        """
        since = self._file(own.rank, own.follows).stat().st_mtime - QUIET
        lower = (entry for follows, rank, entry in self._found() if follows == own.follows and rank < own.rank)
        return not any((found := _stat(entry)) is not None and found.st_mtime >= since for entry in lower)

    def poll(self) -> bool:
        """Read files added since the last call, and return whether there are any. Ignores files of earlier attempts and
        files that cannot be read."""
        before = len(self._read) + len(self.unread)
        counts = [sum(crash.follows is follows for crash in self._read.values()) for follows in (False, True)]
        stated = [(follows, rank, entry, found) for follows, rank, entry in self._found() if (found := _stat(entry))]
        for follows, rank, entry, found in sorted(stated, key=lambda file: (file[0], file[3].st_mtime_ns)):  # causes first
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
        """Return the path of a rank's file. Its name shows the kind of failure so that other ranks need not open it."""
        return self._folder / f"rank-{rank}{'-follows' if follows else ''}.json"

    def _found(self) -> list[_Found]:
        """Return the existing files, sorted by rank."""
        with os.scandir(self._folder) as entries:
            named = [(found, entry) for entry in entries if (found := _NAME.fullmatch(entry.name))]
        ranked = [(found[2] is not None, int(found[1]), entry) for found, entry in named]
        return sorted((file for file in ranked if file[1] < self._world_size), key=lambda file: file[1])


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except FileNotFoundError:  # a file of an earlier attempt, which its rank has just replaced
        return None


def _crash(file: Path) -> RankCrash | None:
    try:
        return RankCrash(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        log.warning("the crash report omits %s, which cannot be read: %s", file, error)
        return None
