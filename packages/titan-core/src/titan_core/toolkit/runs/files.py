"""Names of the files in a run's directory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from titan_core.api.config.run_folder import PREVIOUS as PREVIOUS
from titan_core.toolkit.files import read_bytes

CONFIG = "config.toml"


PLUGINS = "plugins.json"


METRICS = "metrics.jsonl"


EVENTS = "events.jsonl"
"""The events of all attempts at the run (:mod:`titan_core.runlog.event_log`)."""


EXCLUDED = "excluded.jsonl"
"""The documents that the run passes over (``data.exclude``)."""


DEBUG = "debug"
"""Folder for the output of debug plugins: traces, dumps, statistics."""


LOGS = "logs"
"""Folder for the files of metric loggers, and for the log of each rank (:mod:`titan_core.loop.outcome`)."""


def digest_of(config: Path) -> str:
    """Return a digest of a config that a run has written. The start event has that of its attempt's."""
    return hashlib.sha256(read_bytes(config)).hexdigest()[:16]
