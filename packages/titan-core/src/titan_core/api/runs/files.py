"""The files of a run's directory, by name."""

from __future__ import annotations

CONFIG = "config.toml"


PLUGINS = "plugins.json"


METRICS = "metrics.jsonl"


EVENTS = "events.jsonl"
"""What happened to the run, over all its attempts (:mod:`titan_core.runlog.event_log`)."""


DEBUG = "debug"
"""A folder for what debugging plugins leave: traces, dumps, statistics."""


LOGS = "logs"
"""A folder for metric loggers with files of their own, and for the log of each rank (:mod:`titan_core.train.outcome`)."""
