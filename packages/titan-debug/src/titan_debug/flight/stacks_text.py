"""Reads the stacks that Python's faulthandler wrote for a process that could write nothing else."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

from titan_debug.flight.dump import Dump, Frame, Thread

_HEADER = re.compile(
    r"^rank (\d+) of (\d+), attempt ([\d.]+), process (\d+) on (\S+), main thread (0x[0-9a-f]+)$", re.MULTILINE
)
_DEATH = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_TIMEOUT = re.compile(r"^Timeout \(.*\)!$", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+) .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def read_stacks(path: Path) -> list[Dump]:
    """Return a dump for each attempt in which the rank's process died or was stuck where Python could not run.

    Raises:
        OSError: ``path`` cannot be read.
        ValueError: ``path`` is not a file of stacks.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    headers = list(_HEADER.finditer(text))
    if not headers or headers[0].start() != 0:
        raise ValueError("it does not start with Titan's header line")
    ends = [*(header.start() for header in headers[1:]), len(text)]
    found = (_parse_attempt(header, text[header.end() : end], path) for header, end in zip(headers, ends, strict=True))
    return [dump for dump in found if dump is not None]


def _parse_attempt(header: re.Match[str], text: str, path: Path) -> Dump | None:
    death = next(iter(_DEATH.finditer(text)), None)
    timeouts = list(_TIMEOUT.finditer(text))
    found = death or (timeouts[-1] if timeouts else None)
    if found is None:
        return None
    main = int(header[6], 16)
    threads: list[Thread] = []
    stacks: list[list[Frame]] = []
    for line in text[found.end() :].splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread is not None:
            ident = int(thread[1], 16)
            threads.append(Thread(thread[1], ident == main, len(stacks)))
            stacks.append([])
        elif frame is not None and stacks:
            code = linecache.getline(frame[1], int(frame[2])).strip()  # the whole line; empty without the source file
            stacks[-1].append(Frame(frame[1], int(frame[2]), frame[3], code))
        elif line and not line.startswith("  ") and stacks:
            break  # the next report
    return Dump(
        rank=int(header[1]),
        world_size=int(header[2]),
        attempt=float(header[3]),
        host=header[5],
        pid=int(header[4]),
        time=path.stat().st_mtime,
        why="the process died" if death is not None else "the process was stuck in an extension",
        step=-1,
        in_step=False,
        coordinates={},
        groups=[],
        entries=[],
        threads=threads,
        stacks=stacks,
        died=death[1].strip() if death is not None else "",
        recorded=False,
    )
