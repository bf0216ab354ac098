"""Writes the stacks of all threads even if the interpreter cannot run."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TextIO

from titan_core.api import World
from titan_debug.flight.dump import STACKS_FILE

log = logging.getLogger(__name__)


class StacksFile:
    """The file to which Python's faulthandler writes the stacks of all threads. It must be open in advance: a process that
    crashes or is stuck in an extension can no longer open files. The file is opened for appending: a rank that died may
    restart before anybody reads what it left."""

    def __init__(self, folder: Path, world: World, attempt: float) -> None:
        self._path = path = folder / STACKS_FILE.format(world.rank)
        self.file: TextIO | None = None
        self._enabled = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a", encoding="utf-8")
            self._begin = self.file.tell()
            print(_header(world, attempt), file=self.file, flush=True)
        except OSError as error:
            log.warning("cannot write %s: %s; a crash in an extension will leave no stacks", path, error.strerror or error)
            self.file = None
            return
        self._empty = self.file.tell()
        # torchrun enables faulthandler on standard error, which may be lost. Any other user's handler stays in place.
        if not faulthandler.is_enabled() or "TORCHELASTIC_RUN_ID" in os.environ:
            self._before = faulthandler.is_enabled()
            faulthandler.enable(file=self.file, all_threads=True)
            self._enabled = True

    def write(self, why: str) -> None:
        """Write all stacks."""
        if self.file is not None:
            print(f"\n{why}", file=self.file, flush=True)
            faulthandler.dump_traceback(file=self.file, all_threads=True)

    def close(self) -> None:
        """Close the file. If this attempt wrote no stacks, drop its header, and remove the file if nothing remains."""
        if self._enabled:
            faulthandler.disable()
            if self._before:
                faulthandler.enable(all_threads=True)
        if self.file is None:
            return
        empty = os.fstat(self.file.fileno()).st_size == self._empty
        if empty:
            self.file.truncate(self._begin)
        self.file.close()
        if empty and self._begin == 0:
            self._path.unlink(missing_ok=True)
            for folder in (self._path.parent, self._path.parent.parent):
                try:
                    folder.rmdir()
                except OSError:  # not empty
                    return


def _header(world: World, attempt: float) -> str:
    main = threading.main_thread().ident or 0
    place = f"rank {world.rank} of {world.size}, attempt {attempt!r}"
    return f"{place}, process {os.getpid()} on {socket.gethostname()}, main thread {main:#018x}"
