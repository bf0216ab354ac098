"""Settings that name a folder in the run's directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from titan_core.api.config.paths import require_nameable
from titan_core.api.config.section import Section

PREVIOUS = "previous"
"""Folder of the run's directory that keeps the files of earlier runs."""


class _InRun:
    """Marks fields of type :data:`RunFolder`."""


def require_below(folder: object) -> str:
    """Return ``folder`` if it is a path below a run's directory.

    Raises:
        ValueError: it is none.
    """
    path = PurePosixPath(folder) if isinstance(folder, str) else PurePosixPath()
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("must be a folder below the run's directory, such as debug/mine")
    if path.parts[0] == PREVIOUS:
        raise ValueError(f"must not be in {PREVIOUS!r}, which keeps the files of earlier runs; use one such as debug/mine")
    return require_nameable(str(folder))


RunFolder = Annotated[str, AfterValidator(require_below), _InRun()]
"""A folder below the run's directory with files of one run. A fresh start moves it to ``previous/N``."""


def run_folders(sections: Iterable[Section]) -> list[str]:
    """Return the values of all :data:`RunFolder` fields in ``sections``."""
    fields = ((section, name, field) for section in sections for name, field in type(section).model_fields.items())
    return [
        getattr(section, name) for section, name, field in fields if any(isinstance(item, _InRun) for item in field.metadata)
    ]
