"""Which package provides what no installed one does: titan-core's metadata has an index of what the packages released with
it provide, ``provides.json``, generated from their plugins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import importlib_metadata

INDEX = "extra_metadata/provides.json"
"""Within the distribution's metadata."""


@cache
def index() -> Mapping[str, Mapping[str, str]]:
    """By kind (``section``, ``key``, ``option`` of a launcher, or a component's kind) and name, the package. Empty where
    titan-core was not installed from its wheel."""
    try:
        text = importlib_metadata.distribution("titan-core").read_text(INDEX)
    except importlib_metadata.PackageNotFoundError:
        text = None
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def provider(kind: str, name: str) -> str | None:
    """The package that provides the section, the key (``"metrics.log_freq"``) or the component ``name``, if one is known."""
    return index().get(kind, {}).get(name)


def provider_of_group(word: str) -> str | None:
    """The package of the commands that begin with ``word``, if one is known."""
    return next((package for name, package in index().get("command", {}).items() if name.split()[0] == word), None)
