"""A trace of torch's profiler, read into columns, so that one of hundreds of megabytes fits into memory."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api.errors import UserError
from titan_debug.profiling.intervals import Intervals

_RANK = re.compile(r"rank-(\d+)\.")


@dataclass(frozen=True)
class TraceEvents:
    """The events of one process's trace that have a duration, by column; times are microseconds on the trace's own clock."""

    path: Path
    rank: int
    """As the trace says, or the name of the file; else 0."""
    world_size: int
    """Ranks of the job; 1 where the trace does not say."""
    names: list[str]
    categories: list[str]
    """``cpu_op``, ``user_annotation``, ``kernel`` and so on."""
    name: NDArray[numpy.int64]
    """Index into :attr:`names`."""
    category: NDArray[numpy.int64]
    """Index into :attr:`categories`."""
    lane: NDArray[numpy.int64]
    """A number for each thread of each process, and each stream of each GPU."""
    start: NDArray[numpy.float64]
    duration: NDArray[numpy.float64]

    def in_category(self, *categories: str) -> NDArray[numpy.bool_]:
        """Which events are of one of ``categories``."""
        return _among(self.category, self.categories, lambda category: category in categories)

    def named(self, wanted: Callable[[str], bool]) -> NDArray[numpy.bool_]:
        """Which events have a name that is ``wanted``, which is asked once a name."""
        return _among(self.name, self.names, wanted)

    def intervals(self, which: NDArray[numpy.bool_]) -> Intervals:
        """From when to when each of the events is."""
        return numpy.stack([self.start[which], self.start[which] + self.duration[which]], axis=1)

    @classmethod
    def read(cls, path: Path) -> TraceEvents:
        """The trace in file ``path``, gzipped or not.

        Raises:
            UserError: it cannot be read, or is no trace.
        """
        columns = _Columns()
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode("utf-8", errors="replace")
            del raw
            document = json.loads(text, object_hook=columns.take)
        except OSError as error:  # what gzip says of a bad file is one too, without a number
            raise _unusable(path, f"cannot be read: {error.strerror or error}") from None
        except (EOFError, zlib.error):
            raise _unusable(path, "its compressed data ends early or is damaged") from None
        except (ValueError, TypeError) as error:
            raise _unusable(path, f"is not whole JSON of trace events ({error})") from None
        if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
            raise _unusable(path, 'is no trace: it has no list "traceEvents"')
        if not columns.start:
            raise _unusable(path, "is a trace without any event that takes time")
        if not (numpy.isfinite(columns.start).all() and numpy.isfinite(columns.duration).all()):
            raise _unusable(path, "is damaged: it has events at no time")
        distributed = document.get("distributedInfo")
        distributed = distributed if isinstance(distributed, dict) else {}
        in_name = _RANK.match(path.name)
        rank = _whole(path, distributed.get("rank"), int(in_name[1]) if in_name else 0)
        return cls(
            path=path,
            rank=rank,
            world_size=_whole(path, distributed.get("world_size"), 1),
            names=list(columns.names),
            categories=list(columns.categories),
            name=numpy.frombuffer(columns.name, dtype=numpy.int64),
            category=numpy.frombuffer(columns.category, dtype=numpy.int64),
            lane=numpy.frombuffer(columns.lane, dtype=numpy.int64),
            start=numpy.frombuffer(columns.start, dtype=numpy.float64),
            duration=numpy.frombuffer(columns.duration, dtype=numpy.float64),
        )


class _Columns:
    """Takes each object of the JSON as soon as it is read, so that no event is kept as one."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self._lanes: dict[tuple[object, object], int] = {}
        self.name, self.category, self.lane = array("q"), array("q"), array("q")
        self.start, self.duration = array("d"), array("d")

    def take(self, value: dict[str, Any]) -> dict[str, Any] | None:
        """Keep ``value`` if it is an event with a duration, drop it if it is another event, and leave it otherwise."""
        if "ph" not in value:
            return value
        if value["ph"] == "X" and "ts" in value:
            # These two raise TypeError first where they are no numbers, and no column is longer than another.
            self.start.append(value["ts"])
            self.duration.append(value.get("dur", 0.0))
            self.name.append(self.names.setdefault(str(value.get("name", "")), len(self.names)))
            self.category.append(self.categories.setdefault(str(value.get("cat", "")), len(self.categories)))
            lane = (str(value.get("pid")), str(value.get("tid")))
            self.lane.append(self._lanes.setdefault(lane, len(self._lanes)))
        return None


def _among(indices: NDArray[numpy.int64], of: list[str], wanted: Callable[[str], bool]) -> NDArray[numpy.bool_]:
    return numpy.array([wanted(one) for one in of], dtype=bool)[indices]


def _whole(path: Path, value: object, otherwise: int) -> int:
    """``value``, or ``otherwise`` where there is none."""
    if value is None:
        return otherwise
    if not isinstance(value, int):
        raise _unusable(path, 'is damaged: its "distributedInfo" has no whole numbers')
    return value


def _unusable(path: Path, why: str) -> UserError:
    return UserError.one(f"trace {str(path)!r}", why, "give a file that torch's profiler wrote whole (.json or .json.gz)")
