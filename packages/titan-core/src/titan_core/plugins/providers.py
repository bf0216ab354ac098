"""Names of packages to install for a missing component. The core knows none: the metadata of a plugin's distribution may
contain an index, ``extra_metadata/provides.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache

import importlib_metadata

from titan_core.plugins.discovery import GROUP

log = logging.getLogger(__name__)

INDEX = "extra_metadata/provides.json"
"""Path within a distribution's metadata."""


@cache
def index() -> Mapping[str, Mapping[str, str]]:
    """Return kind -> name -> package, as the installed plugins' distributions know it. A kind is ``section``, ``key``,
    ``option`` (of a launcher) or a component's kind."""
    found: dict[str, dict[str, str]] = {}
    for point in importlib_metadata.entry_points(group=GROUP):
        text = point.dist.read_text(INDEX) if point.dist is not None else None
        try:
            for kind, names in json.loads(text or "{}").items():
                found.setdefault(kind, {}).update({str(name): str(package) for name, package in names.items()})
        except (ValueError, AttributeError) as error:  # only the fix in an error becomes less precise
            log.warning("%s of plugin %r is unusable: %s", INDEX, point.name, error)
    return found


def provider(kind: str, name: str) -> str | None:
    """Return the package that provides the section, key (``"metrics.log_freq"``) or component ``name``, if known."""
    return index().get(kind, {}).get(name)


def provider_of_group(word: str) -> str | None:
    """Return the package of the commands that begin with ``word``, if known."""
    return next((package for name, package in index().get("command", {}).items() if name.split()[0] == word), None)
