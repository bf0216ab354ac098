"""Stacks of Python threads: taken, described, and written by faulthandler even if the interpreter cannot run. Imports no
torch."""

from __future__ import annotations

import faulthandler
import linecache
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TextIO

from titan_core.toolkit.files import LONGEST_TABLE, read_text
from titan_debug.flight.dump import Frame

log = logging.getLogger(__name__)

STACKS_FILE = "rank-{}.stacks.txt"
DEEPEST = 100
"""Largest number of calls kept of a stack, counted from the innermost."""
_LONGEST = 100
_LIBRARY = re.compile(
    r"^<|/(site|dist)-packages/(torch|torchgen|torchao|pluggy)/|/lib/python3\.\d+/(?!(site|dist)-packages)"
)
_HEADER = re.compile(r"^rank (\d+), attempt ([\d.]+), process .*\n", re.MULTILINE)


def thread_stacks() -> list[tuple[str, bool, list[Frame]]]:
    """Return for each thread its name, whether it is the main thread, and its stack. Omits the calling thread unless it is
    the main thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    return [
        (names.get(ident, str(ident)), ident == main, stack_of(frame))
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - documented
        if ident != own or ident == main
    ]


def stack_of(frame: FrameType | None) -> list[Frame]:
    """Return the calls that lead to ``frame``, innermost first."""
    frames: list[Frame] = []
    while frame is not None and len(frames) < DEEPEST:
        code = frame.f_code
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name, _expression(frame)))
        frame = frame.f_back
    return frames


def _expression(frame: FrameType) -> str:
    """Return the source of the expression that ``frame`` is evaluating, on one line; empty if there is no source."""
    positions = next(islice(frame.f_code.co_positions(), max(frame.f_lasti, 0) // 2, None), None)
    if positions is None:
        return ""
    first, last, begin, end = positions
    if first is None or begin is None or end is None:
        return ""
    line = linecache.getline(frame.f_code.co_filename, first, frame.f_globals).rstrip("\n").encode()
    text = line[begin:end] if first == last else line[begin:] + b" ..."  # columns count bytes
    shown = " ".join(text.decode(errors="replace").split())
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 4] + " ..."


def own_frame(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost call outside torch, pluggy and the standard library, or the innermost call if there is none."""
    return next((frame for frame in stack if not _LIBRARY.search(frame.file)), stack[0] if stack else None)


def waits_in_torch(stack: Sequence[Frame]) -> bool:
    """Whether the innermost calls belong to ``torch.distributed`` rather than to the user's own code. The thread then most
    likely waits for another rank, as it does in a work handle's ``wait``, which has no Python frame of its own."""
    if stack and ".wait(" in stack[0].code:
        return True
    for frame in stack[:4]:
        if "/torch/distributed/" in frame.file:
            return True
        if not _LIBRARY.search(frame.file):
            return False
    return False


def short_path(file: str) -> str:
    """Return ``file`` relative to its package root or to the working directory."""
    for marker in ("/site-packages/", "/src/"):
        if marker in file:
            return file.rpartition(marker)[2]
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def location(stack: Sequence[Frame]) -> str:
    """Return the innermost call outside libraries: ``my_plugin.py:12 in titan_step_start``."""
    frame = own_frame(stack)
    return f"{short_path(frame.file)}:{frame.line} in {frame.function}" if frame is not None else "an unknown place"


def place(stack: Sequence[Frame]) -> str:
    """Return where a thread is: ``in time.sleep(60) at my_plugin.py:12 in titan_step_start``."""
    frame = own_frame(stack)
    return f"in {frame.code} at {location(stack)}" if frame is not None and frame.code else f"at {location(stack)}"


class StacksFile:
    """The file to which Python's faulthandler writes the stacks of all threads. It must be open in advance: a process that
    crashes or is stuck in an extension can no longer open files. The file is opened for appending: a rank that died may
    restart before anybody reads what it left."""

    def __init__(self, folder: Path, rank: int, attempt: float) -> None:
        self._path = path = folder / STACKS_FILE.format(rank)
        self.file: TextIO | None = None
        self._enabled = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a", encoding="utf-8")
            self._begin = self.file.tell()
            process = f"process {os.getpid()} on {socket.gethostname()}"
            print(f"rank {rank}, attempt {attempt!r}, {process}", file=self.file, flush=True)
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


@dataclass(frozen=True)
class LeftStacks:
    """What faulthandler wrote for a rank in the latest attempt that its file knows."""

    rank: int
    attempt: float
    file: Path
    text: str

    @property
    def died(self) -> bool:
        """Whether a signal ended the process."""
        return "Fatal Python error: " in self.text


def left_stacks(folder: Path, notes: list[str]) -> list[LeftStacks]:
    """Return the stacks in ``folder``, ordered by rank. ``notes`` receives which files were ignored, and why."""
    found: list[LeftStacks] = []
    for path in folder.glob(STACKS_FILE.format("*")):
        try:
            text = read_text(path, longest=LONGEST_TABLE, errors="replace", inside=path.parent)
        except OSError as error:
            notes.append(f"ignored {path.name}: it cannot be read ({error.strerror or error})")
            continue
        for header in list(_HEADER.finditer(text))[-1:]:
            stacks = text[header.end() :].strip()
            found += [LeftStacks(int(header[1]), float(header[2]), path, stacks)] if stacks else []
    return sorted(found, key=lambda one: one.rank)
