"""Differences between runs: config keys and plugin versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_core.api.config.secrets import redact
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import show
from titan_report.shown import UNKNOWN, Table

_IGNORED = frozenset({"job.dump_folder"})
"""Keys that always differ between runs."""


def config_differences(runs: Sequence[RunLog], names: Sequence[str]) -> Table:
    """Return the keys whose values differ between ``runs``, in config order. Secrets that differ are listed but masked."""
    flat = [flatten(run.config) for run in runs]
    masked = [flatten(redact(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for config in flat for key in config) if key not in _IGNORED]
    different = (key for key in keys if len({_shown(config, key) for config in flat}) > 1)
    rows = tuple((key, *(_shown(config, key) for config in masked)) for key in different)
    return Table("Config differences", ("key", *names), rows)


def version_differences(runs: Sequence[RunLog], names: Sequence[str]) -> Table:
    """Return the plugins that some ``runs`` lacked, or whose versions differ."""
    versions = [{plugin["distribution"]: plugin["version"] for plugin in run.plugins} for run in runs]
    distributions = dict.fromkeys(name for installed in versions for name in installed)
    rows = ((name, *(installed.get(name, UNKNOWN) for installed in versions)) for name in distributions)
    return Table("Plugin differences", ("distribution", *names), tuple(row for row in rows if len(set(row[1:])) > 1))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the nested tables as one mapping with keys ``section.key``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return show(flat[key]) if key in flat else UNKNOWN
