"""Stacks of Python threads, and how to describe them."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType

from titan_debug.flight.dump import Frame

DEEPEST = 100
"""Largest number of calls kept of a stack, counted from the innermost."""
_LONGEST = 100
_LIBRARY = re.compile(
    r"^<|/(site|dist)-packages/(torch|torchgen|torchao|pluggy)/|/lib/python3\.\d+/(?!(site|dist)-packages)"
)


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
        frames.append(_frame(frame, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return frames


def stack_of_traceback(traceback: TracebackType | None) -> list[Frame]:
    """Return the calls between the handler and the ``raise`` of an exception, innermost first."""
    frames: list[Frame] = []
    while traceback is not None:
        frames.append(_frame(traceback.tb_frame, traceback.tb_lineno, traceback.tb_lasti))
        traceback = traceback.tb_next
    return frames[::-1][:DEEPEST]


def _frame(frame: FrameType, line: int, instruction: int) -> Frame:
    code = frame.f_code
    return Frame(code.co_filename, line or 0, code.co_name, _expression(frame, instruction))


def _expression(frame: FrameType, instruction: int) -> str:
    """Return the source of the expression that ``frame`` is evaluating, on one line; empty if there is no source."""
    positions = next(islice(frame.f_code.co_positions(), max(instruction, 0) // 2, None), None)
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
