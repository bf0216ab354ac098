"""Text for people: tables, sizes, names of ranks, and values without secrets."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from pydantic import ValidationError

from titan_core.api._shown import printable as printable, shorten as shorten, show as show
from titan_core.api.config.secrets import redact_text


def show_mistakes(error: ValidationError, name_of: Callable[[str, Any], str] = lambda key, value: key) -> str:
    """Return what pydantic found wrong with values from a file, in one line: each key with its value and the reason.

    Args:
        name_of: (dotted key, value) -> the key as the file has it.
    """
    shown = []
    for entry in error.errors(include_url=False):
        key = ".".join(map(str, entry["loc"]))
        reason = " ".join(entry["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1).split())
        if not key:  # a rule over several keys, whose message names them
            shown.append(reason)
        elif entry["type"] in ("missing", "extra_forbidden"):
            shown.append(f"{key} is {'missing' if entry['type'] == 'missing' else 'unknown'}")
        else:
            shown.append(f"{name_of(key, entry['input'])} is {show(entry['input'], key)}, and {reason}")
    return "; ".join(shown)


def show_bytes(size: float) -> str:
    """Return ``size`` as in ``"16.1 GiB"``."""
    if size < 1024:
        return f"{size:.0f} B"
    power = next((power for power in (1, 2, 3) if size < 1024 ** (power + 1)), 4)
    return f"{size / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def show_count(count: int) -> str:
    """Return ``count`` in a few characters: ``"512"``, ``"1.3M"``, ``"406B"``."""
    size, unit = float(count), ""
    for larger in "KMBT":
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f}{unit}" if unit and size < 99.95 else f"{size:.0f}{unit}"


def show_seconds(seconds: float) -> str:
    """Return a duration in its two largest units: ``"3 d 4 h"``, ``"2 min 5 s"``."""
    whole = round(max(0.0, seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    if minutes:
        return f"{minutes} min {whole % 60} s"
    return f"{whole} s"


def describe_model(name: str, parameters: int, active: int | None = None) -> str:
    """Return the name of a model (:attr:`.AssembledJob.name`) with its number of parameters, and of those that a token uses,
    if these are fewer: ``"moe small (30.5B parameters, 3.3B active)"``."""
    fewer = f", {show_count(active)} active" if active is not None and active < parameters else ""
    return f"{name} ({show_count(parameters)} parameters{fewer})"


def say(*values: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """``print`` for people: escapes what a terminal would obey. Each text that may come from a recipe, a file, a checkpoint,
    a run or the hub is printed by this function, or by one that uses it."""
    print(printable(" ".join(map(str, values))), end=end, file=file, flush=flush)


def log_to_stderr() -> None:
    """Log warnings and worse to standard error, without secrets, such as a password in the address of a checkpoint, because
    logs are kept and shared; and without what a terminal would obey, because messages quote data."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ForPeople("titan: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class _ForPeople(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(redact_text(super().format(record)))


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    print(json.dumps(value, indent=2))


def print_notes(notes: Iterable[str]) -> None:
    """Print ``notes`` (:attr:`titan_core.api.plugins.assembled_job.AssembledJob.notes`), one per line."""
    for note in notes:
        say(f"note: {note}")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with aligned columns; the last one may have any width. (``rich`` would take longer to import than most
    commands take to run.)"""
    shown = [[printable(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def ranks(numbers: Iterable[int]) -> str:
    """Return ``rank 1``, or ``ranks 0-2, 5``."""
    numbers = sorted(set(numbers))
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {spans(numbers)}"


def spans(numbers: Iterable[int]) -> str:
    """Return ``0-2, 5``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def is_estimated(records: Iterable[Mapping[str, object]]) -> bool:
    """Whether any record has an MFU relative to a measured peak rather than the peak of a data sheet."""
    return any(record.get("mfu_estimated") for record in records)


def format_mfu(mfu: float, estimated: bool) -> str:
    """Return a percentage, with a tilde if it is an estimate. Values above 100 % are marked as having too low a peak."""
    text = f"{'~' if estimated else ''}{mfu:.1%}"
    return f"{text} (peak too low)" if mfu > 1.0 else text
