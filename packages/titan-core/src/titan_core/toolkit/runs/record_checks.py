"""Checks the records in a run's files. Foreign or damaged records are reported and not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.api.config.numbers import LARGEST, MOST_RANKS
from titan_core.toolkit.json_lines import records_of

_LAST_TIME = 253402300800.0
"""Upper bound of plausible times: the year 10000, in seconds since the epoch."""

_REQUIRED_BY_EVENT: Mapping[str, Mapping[str, str]] = {
    "start": {"steps": "whole number", "world_size": "whole number"},
    "branch": {"parent": "string"},
    "rewind": {"documents": "whole number"},
    "spent": {"seconds": "mapping of numbers"},
    "checkpoint": {"path": "string"},
    "sample": {"prompt": "string", "text": "string"},
    "finding": {"kind": "string", "message": "string"},
}
"""Additional required keys and their types, by kind of event."""

_OPTIONAL: Mapping[str, str] = {"mesh": "mapping", "began": "time", "launched": "time", "from": "whole number"}


def checked_records(
    file: Path, flaw_of: Callable[[Mapping[str, Any]], str | None], skipped: Callable[[int], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of ``file``; none if the file does not exist.

    Args:
        flaw_of: returns what is wrong with a record, or ``None``.
        skipped: see :func:`~titan_core.toolkit.json_lines.records_of`.

    Raises:
        UserError: the file cannot be read, or a record has a flaw.
    """
    try:
        for number, record in records_of(file, skipped):
            flaw = flaw_of(record)
            if flaw is not None:
                raise UserError.one(f"{file}:{number}", f"invalid record: {flaw}", "remove this line, or restore the file")
            yield record
    except OSError as error:
        raise UserError.one(str(file), f"cannot be read: {error.strerror or error}", "restore the file") from None


def metrics_flaw(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a record of ``metrics.jsonl``, or ``None``."""
    timed = {"time": "time"} if record.get("time") is not None else {}
    return _flaw(record, {"step": "whole number", **timed})


def event_flaw(event: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a record of ``events.jsonl``, or ``None``."""
    flaw = _flaw(event, {"event": "string", "time": "time", "step": "whole number"})
    given = {key: kind for key, kind in _OPTIONAL.items() if event.get(key) is not None}
    return flaw or _flaw(event, {**_REQUIRED_BY_EVENT.get(event["event"], {}), **given})


def _flaw(record: Mapping[str, Any], needed: Mapping[str, str]) -> str | None:
    for key, kind in needed.items():
        if key not in record:
            return f"it has no {key!r}"
        if not _is(record[key], kind):
            return f"its {key!r} is not a {kind}"
    return None


def _is(value: Any, kind: str) -> bool:
    if kind == "string":
        return isinstance(value, str)
    if kind == "mapping":
        return isinstance(value, Mapping)
    if kind == "mapping of numbers":
        return isinstance(value, Mapping) and all(_is(each, "number") for each in value.values())
    if isinstance(value, bool):
        return False
    if kind == "number":
        return isinstance(value, int | float) and 0 <= value < _LAST_TIME * MOST_RANKS
    if kind == "time":
        return isinstance(value, int | float) and 0 <= value < _LAST_TIME
    return isinstance(value, int) and abs(value) <= LARGEST
