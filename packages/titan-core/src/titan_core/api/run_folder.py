"""Settings that name a folder of a run's directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from titan_core.api.paths import require_nameable
from titan_core.api.section import Section

PREVIOUS = "previous"
"""The folder of a run's directory that keeps the files of the runs before it."""


class _InRun:
    """Marks such fields."""


def _below(folder: str) -> str:
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("must be a folder below the run's directory, such as debug/mine")
    if path.parts[0] == PREVIOUS:
        raise ValueError(f"must not be in {PREVIOUS!r}, where older runs' files are kept; take one such as debug/mine")
    return require_nameable(folder)


RunFolder = Annotated[str, AfterValidator(_below), _InRun()]
"""A folder below the run's directory, which belongs to one run: a fresh start moves it to ``previous/N``."""


def run_folders(sections: Iterable[Section]) -> list[str]:
    """Those that ``sections`` name."""
    fields = ((section, name, field) for section in sections for name, field in type(section).model_fields.items())
    return [
        getattr(section, name) for section, name, field in fields if any(isinstance(one, _InRun) for one in field.metadata)
    ]
