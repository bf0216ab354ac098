"""What every line of a run's files must have for its readers; a foreign or damaged one is told of, and not believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_OF_KIND: Mapping[str, Mapping[str, str]] = {
    "start": {"steps": "whole number", "world_size": "whole number"},
    "checkpoint": {"path": "text"},
    "finding": {"kind": "text", "message": "text"},
}
"""What events of a kind must have besides."""


def metrics_flaw(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a line of ``metrics.jsonl``, in words; ``None`` if nothing is."""
    timed = {"time": "number"} if record.get("time") is not None else {}
    return _flaw(record, {"step": "whole number", **timed})


def event_flaw(event: Mapping[str, Any]) -> str | None:
    """The same of ``events.jsonl``."""
    flaw = _flaw(event, {"event": "text", "time": "number", "step": "whole number"})
    return flaw or _flaw(event, _OF_KIND.get(event["event"], {}))


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
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind == "number" and isinstance(value, float) and math.isfinite(value))
