"""What was different between runs: keys of their configs, and versions of plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_core.api.tools.secrets import without_secrets
from titan_core.api.tools.shown import show
from titan_report.numbers import UNKNOWN
from titan_report.table import Table
from titan_runs.run_log import RunLog

_OF_EVERY_RUN = frozenset({"job.dump_folder"})
"""Keys that differ between any two runs and say nothing of either."""


def config_differences(runs: Sequence[RunLog], names: Sequence[str]) -> Table:
    """The keys whose values are not the same in all ``runs``, in the order of the configs. Of secrets, only
    that they differ."""
    flat = [flatten(run.config) for run in runs]
    told = [flatten(without_secrets(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in _OF_EVERY_RUN]
    different = (key for key in keys if len({_shown(one, key) for one in flat}) > 1)
    rows = tuple((key, *(_shown(one, key) for one in told)) for key in different)
    return Table("Config differences", ("key", *names), rows)


def version_differences(runs: Sequence[RunLog], names: Sequence[str]) -> Table:
    """The plugins that not all ``runs`` had, or in other versions."""
    versions = [{one["distribution"]: one["version"] for one in run.plugins} for run in runs]
    distributions = dict.fromkeys(name for one in versions for name in one)
    rows = ((name, *(one.get(name, UNKNOWN) for one in versions)) for name in distributions)
    return Table("Plugin differences", ("distribution", *names), tuple(row for row in rows if len(set(row[1:])) > 1))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables within tables as ``section.key``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return show(flat[key]) if key in flat else UNKNOWN
