"""Reading what Python's faulthandler has written of a process that could write nothing else."""

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
    """What ``path`` says of the processes of its rank, one in each attempt: that one died, or was stuck where Python could
    not run. Those of which it says neither are not there.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    headers = list(_HEADER.finditer(text))
    if not headers or headers[0].start() != 0:
        raise ValueError("its first line is none of ours")
    ends = [*(header.start() for header in headers[1:]), len(text)]
    found = (_of_one(header, text[header.end() : end], path) for header, end in zip(headers, ends, strict=True))
    return [dump for dump in found if dump is not None]


def _of_one(header: re.Match[str], text: str, path: Path) -> Dump | None:
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
            code = linecache.getline(frame[1], int(frame[2])).strip()  # a whole line; empty if the file is not here
            stacks[-1].append(Frame(frame[1], int(frame[2]), frame[3], code))
        elif line and not line.startswith("  ") and stacks:
            break  # of another occasion
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
