"""Names of packages to install for a missing component: ``provides.json``, in titan-core's metadata, indexes the components
of all packages released with it. It is generated from their plugins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from titan_core.plugins.names import ours

INDEX = "extra_metadata/provides.json"
"""Path within the distribution's metadata."""


@cache
def index() -> Mapping[str, Mapping[str, str]]:
    """Return kind -> name -> package. A kind is ``section``, ``key``, ``option`` (of a launcher) or a component's kind.

    The index is empty if titan-core was not installed from its wheel.
    """
    distribution = ours()
    text = distribution.read_text(INDEX) if distribution is not None else None
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def provider(kind: str, name: str) -> str | None:
    """Return the package that provides the section, key (``"metrics.log_freq"``) or component ``name``, if known."""
    return index().get(kind, {}).get(name)


def provider_of_group(word: str) -> str | None:
    """Return the package of the commands that begin with ``word``, if known."""
    return next((package for name, package in index().get("command", {}).items() if name.split()[0] == word), None)
