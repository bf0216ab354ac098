"""Finds the traces of torch's profiler, and reads one into columns: a trace of hundreds of megabytes fits into memory."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import numpy
from numpy.typing import NDArray

from titan_core.api import UserError
from titan_core.toolkit.files import open_file
from titan_core.toolkit.runs.files import CONFIG
from titan_core.toolkit.runs.run_log import RunLog
from titan_debug.config import ProfilingSection

Intervals = NDArray[numpy.float64]
"""Sets of times: arrays of shape ``[n, 2]`` whose rows are half-open intervals ``[start, end)``."""
_STEP = re.compile(r"step-(\d+)")
_FILE = re.compile(r"[^.].*\.json(\.gz)?")
_DEFAULT: str = ProfilingSection.model_fields["save_traces_folder"].default
_RANK = re.compile(r"rank-(\d+)\.")


_LONGEST: Final = 512 << 20
"""Bytes of a trace, decompressed. Its events become columns while it is parsed."""


@dataclass(frozen=True)
class TraceEvents:
    """The events with a duration in one process's trace, as columns. Times are microseconds on the trace's clock."""

    path: Path
    rank: int
    """The rank in the trace's metadata, else in the file's name, else 0."""
    world_size: int
    """Number of ranks of the job; 1 if the trace's metadata lacks it."""
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
        """Return a mask of the events in one of ``categories``."""
        return _among(self.category, self.categories, lambda category: category in categories)

    def named(self, wanted: Callable[[str], bool]) -> NDArray[numpy.bool_]:
        """Return a mask of the events whose name is ``wanted``. Calls ``wanted`` once per distinct name."""
        return _among(self.name, self.names, wanted)

    def intervals(self, which: NDArray[numpy.bool_]) -> Intervals:
        """Return the intervals of the events selected by mask ``which``."""
        return numpy.stack([self.start[which], self.start[which] + self.duration[which]], axis=1)

    @classmethod
    def read(cls, path: Path) -> TraceEvents:
        """Read the trace in ``path``, gzipped or not.

        Raises:
            UserError: the file cannot be read, is not a trace, or is too long.
        """
        columns = _Columns()
        try:
            document = json.loads(_text(path), object_hook=columns.take)
        except OSError as error:  # includes gzip.BadGzipFile, which has no strerror
            raise _unusable(path, f"cannot be read: {error.strerror or error}") from None
        except (EOFError, zlib.error):
            raise _unusable(path, "its compressed data ends early or is damaged") from None
        except (ValueError, TypeError) as error:
            raise _unusable(path, f"is not a complete JSON trace ({error})") from None
        if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
            raise _unusable(path, 'is not a trace: it has no list "traceEvents"')
        if not columns.start:
            raise _unusable(path, "contains no event with a duration")
        if not (numpy.isfinite(columns.start).all() and numpy.isfinite(columns.duration).all()):
            raise _unusable(path, "is damaged: the time of an event is not finite")
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
    """Converts each JSON object as soon as it is parsed, so that no event remains in memory as an object."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self._lanes: dict[tuple[object, object], int] = {}
        self.name, self.category, self.lane = array("q"), array("q"), array("q")
        self.start, self.duration = array("d"), array("d")

    def take(self, value: dict[str, Any]) -> dict[str, Any] | None:
        """Add ``value`` to the columns if it is an event with a duration. Drop other events, and return any other object
        unchanged."""
        if "ph" not in value:
            return value
        if value["ph"] == "X" and "ts" in value:
            # First the two that raise TypeError if the value is not a number, so that all columns keep the same length.
            self.start.append(value["ts"])
            self.duration.append(value.get("dur", 0.0))
            self.name.append(self.names.setdefault(str(value.get("name", "")), len(self.names)))
            self.category.append(self.categories.setdefault(str(value.get("cat", "")), len(self.categories)))
            lane = (str(value.get("pid")), str(value.get("tid")))
            self.lane.append(self._lanes.setdefault(lane, len(self._lanes)))
        return None


def _among(indices: NDArray[numpy.int64], of: list[str], wanted: Callable[[str], bool]) -> NDArray[numpy.bool_]:
    return numpy.array([wanted(name) for name in of], dtype=bool)[indices]


def _whole(path: Path, value: object, otherwise: int) -> int:
    """Return ``value``, or ``otherwise`` if it is ``None``."""
    if value is None:
        return otherwise
    if not isinstance(value, int):
        raise _unusable(path, 'is damaged: "rank" and "world_size" of "distributedInfo" must be whole numbers')
    return value


def _text(path: Path) -> str:
    """Return the text of a trace, gzipped or not.

    Raises:
        UserError: it is longer than :data:`_LONGEST`.
        OSError: it cannot be read.
        EOFError, zlib.error: its compressed data is damaged.
    """
    with open_file(path) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        content = (cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file).read(_LONGEST + 1)
    if len(content) > _LONGEST:
        unpacked = " once it is decompressed" if packed else ""
        why = f"is longer than {_LONGEST:,} bytes{unpacked}, the most that Titan reads of a trace"
        raise _unusable(path, why, _SHORTER)
    return content.decode("utf-8", errors="replace")


_COMPLETE: Final = "pass a complete trace of torch's profiler (.json or .json.gz)"
_SHORTER: Final = (
    "record fewer steps (profiling.profiler_active) without the stacks of Python (profiling.with_stack), or open it in "
    "ui.perfetto.dev"
)


def _unusable(path: Path, why: str, fix: str = _COMPLETE) -> UserError:
    return UserError.one(f"trace {str(path)!r}", why, fix)


def trace_files(path: Path) -> list[Path]:
    """Return the traces for ``path``, sorted by rank. ``path`` may be a trace, a folder of traces, or a run's directory or
    its folder of traces. The last two stand for the last step with traces.

    Raises:
        UserError: there are no traces.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError.one(str(path), "no such file or folder", "pass a trace, a folder of traces, or a run's directory")
    if (path / CONFIG).exists():
        return _newest(RunLog.read_folder(path, "profiling.save_traces_folder", _DEFAULT), f"run {str(path)!r}")
    return _in_folder(path) or _newest(path, str(path))


def _newest(folder: Path, where: str) -> list[Path]:
    steps = sorted(
        (step for step in folder.glob("step-*") if _STEP.fullmatch(step.name)),
        key=lambda step: _number(step.name),
        reverse=True,
    )
    for step in steps:
        files = _in_folder(step)
        if files:
            return files
    fix = "train with --profiling.enable_profiling true, or send SIGUSR2 to a running rank's process"
    raise UserError.one(where, f"no traces in {folder}", fix)


def _in_folder(folder: Path) -> list[Path]:
    """Return the traces in ``folder``. Omits hidden files, which are incomplete."""
    files = (file for file in folder.iterdir() if file.is_file() and _FILE.fullmatch(file.name))
    return sorted(files, key=lambda file: (_number(file.name), file.name))


def _number(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0
