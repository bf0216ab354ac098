"""MFU as people read it. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def is_estimated(records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether MFU in some of a run's records is relative to a peak that was measured, and not to a data sheet's."""
    return any(record.get("mfu_estimated") for record in records)


def format_mfu(mfu: float, estimated: bool) -> str:
    """A percentage, with a tilde where it is an estimate. Above 100 % the peak was estimated too low, which is said."""
    text = f"{'~' if estimated else ''}{mfu:.1%}"
    return f"{text} (peak too low)" if mfu > 1.0 else text
