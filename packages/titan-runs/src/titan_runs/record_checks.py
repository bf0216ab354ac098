"""What every line of a run's files must have for its readers; a foreign or damaged one is reported, and not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan_core.api.errors import UserError
from titan_core.api.runs.json_lines import read_lines

_LAST_TIME = 253402300800.0
"""Seconds since the epoch: the year 10000, which no clock shows."""

_OF_KIND: Mapping[str, Mapping[str, str]] = {
    "start": {"steps": "whole number", "world_size": "whole number"},
    "checkpoint": {"path": "text"},
    "finding": {"kind": "text", "message": "text"},
}
"""What events of a kind must have besides."""


def checked_records(file: Path, flaw_of: Callable[[Mapping[str, Any]], str | None]) -> list[dict[str, Any]]:
    """The records of ``file``, each without a flaw; none where there is no file.

    Raises:
        UserError: it cannot be read, or one has a flaw.
    """
    try:
        records = read_lines(file)
    except OSError as error:
        raise UserError.one(str(file), f"cannot be read: {error.strerror or error}", "restore the file") from None
    for number, record in enumerate(records, 1):
        flaw = flaw_of(record)
        if flaw is not None:
            why = f"this line is none of a run's: {flaw}"
            raise UserError.one(f"{file}:{number}", why, "remove it, or restore the file")
    return records


def metrics_flaw(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a line of ``metrics.jsonl``, in words; ``None`` if nothing is."""
    timed = {"time": "time"} if record.get("time") is not None else {}
    return _flaw(record, {"step": "whole number", **timed})


def event_flaw(event: Mapping[str, Any]) -> str | None:
    """The same of ``events.jsonl``."""
    flaw = _flaw(event, {"event": "text", "time": "time", "step": "whole number"})
    mesh = {"mesh": "table"} if event.get("mesh") is not None else {}
    return flaw or _flaw(event, {**_OF_KIND.get(event["event"], {}), **mesh})


def _flaw(record: Mapping[str, Any], needed: Mapping[str, str]) -> str | None:
    for key, kind in needed.items():
        if key not in record:
            return f"it has no {key!r}"
        if not _is(record[key], kind):
            return f"its {key!r} is no {kind}"
    return None


def _is(value: Any, kind: str) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "table":
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return False
    if kind == "time":
        return isinstance(value, int | float) and 0 <= value < _LAST_TIME
    return isinstance(value, int)
