"""Stacks of threads that can be written when Python itself cannot run."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TextIO

from titan_core.api.world import World
from titan_debug.flight.dump import STACKS_FILE

log = logging.getLogger(__name__)


class StacksFile:
    """Where Python's faulthandler writes the stacks of all threads. It has to be open beforehand: a process that crashes in
    an extension, or is stuck in one, cannot open files any more. What earlier attempts have left stays, before it: a rank
    that died is started again before anybody can look."""

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
            log.warning(
                "%s cannot be written, so a crash in an extension leaves no stacks: %s", path, error.strerror or error
            )
            self.file = None
            return
        self._empty = self.file.tell()
        # torchrun switches it on for standard error, which is not there to be read afterwards. Anyone else's is left.
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
        """Close it; without what was written in this attempt, if that says nothing, and removed if nothing is left."""
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
                except OSError:  # it holds something
                    return


def _header(world: World, attempt: float) -> str:
    main = threading.main_thread().ident or 0
    place = f"rank {world.rank} of {world.size}, attempt {attempt!r}"
    return f"{place}, process {os.getpid()} on {socket.gethostname()}, main thread {main:#018x}"
