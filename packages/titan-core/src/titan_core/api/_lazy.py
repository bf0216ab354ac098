"""Imports the names of the contract when they are first used, so that nobody has to know which of them import torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from titan_core.api._contents import CONTENTS, DEPRECATED


def names_of(chapter: str | None = None) -> list[str]:
    """Return the promised names of a chapter (default: of all), sorted."""
    return sorted(_files(chapter))


def getter(module: str, chapter: str | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` (PEP 562) of ``module``, which has the promised names of a chapter (default: of all)."""
    files = _files(chapter)

    def get(name: str) -> Any:
        if name not in files:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name in DEPRECATED:
            warnings.warn(
                f"titan_core.api.{name} goes with the next minor version: {DEPRECATED[name]}", DeprecationWarning, 2
            )
        found = getattr(import_module(f"titan_core.api.{files[name]}"), name)
        setattr(sys.modules[module], name, found)
        return found

    return get


def _files(chapter: str | None) -> dict[str, str]:
    chapters = CONTENTS.values() if chapter is None else [CONTENTS[chapter]]
    return {name: file for files in chapters for file, names in files.items() for name in names.split()}
