"""A run's directory, read back: what `titan report`, `titan watch` and `titan compare` know of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titan_core.errors import UserError
from titan_core.metrics.json_lines import read_lines
from titan_core.train.run_directory import CONFIG, EVENTS, METRICS, PLUGINS


@dataclass(frozen=True)
class RunLog:
    """What a run has written so far. It may still be running, or have been killed at any instant."""

    path: Path
    config: dict[str, Any]
    """Resolved, by section."""
    plugins: list[dict[str, str]]
    steps: list[dict[str, Any]]
    """The records of logged steps, in order."""
    validations: list[dict[str, Any]]
    """Those of validations."""
    events: list[dict[str, Any]]
    """Starts, checkpoints and ends (:mod:`titan_core.metrics.event_log`), in order; of earlier attempts too."""

    @classmethod
    def read(cls, path: str | Path) -> RunLog:
        """The run in directory ``path``.

        Raises:
            UserError: no run is there, or its files are damaged.
        """
        path = Path(path)
        if not (path / METRICS).exists() and not (path / EVENTS).exists():
            there = "there is no such directory" if not path.is_dir() else f"it has neither {METRICS} nor {EVENTS}"
            raise UserError.one(f"run {str(path)!r}", there, "give a run's directory (job.dump_folder)")
        records = read_lines(path / METRICS)
        config, plugins = path / CONFIG, path / PLUGINS
        try:
            return cls(
                path,
                tomli.loads(config.read_text(encoding="utf-8")) if config.exists() else {},
                json.loads(plugins.read_text(encoding="utf-8")) if plugins.exists() else [],
                [record for record in records if "loss" in record],
                [record for record in records if "validation_loss" in record],
                read_lines(path / EVENTS),
            )
        except (OSError, ValueError) as error:
            raise UserError.one(f"run {str(path)!r}", f"cannot be read: {error}", "restore its files") from None

    @property
    def name(self) -> str:
        """What to call it: the directory's own name."""
        return self.path.resolve().name

    @property
    def times(self) -> list[float]:
        """When its records were written, in seconds since the epoch; steps first, then validations."""
        return [record["time"] for record in (*self.steps, *self.validations) if record.get("time") is not None]
