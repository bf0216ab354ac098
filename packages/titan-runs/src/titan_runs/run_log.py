"""A run's directory, read back: what `titan report`, `titan watch` and `titan compare` know of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.api.errors import UserError
from titan_core.api.runs.files import CONFIG, EVENTS, METRICS, PLUGINS
from titan_core.api.tools.toml import parse_toml
from titan_runs.record_checks import checked_records, event_flaw, metrics_flaw


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
    """Starts, checkpoints and ends (:mod:`titan_core.runlog.event_log`), in order; of earlier attempts too."""

    @classmethod
    def read(cls, path: str | Path) -> RunLog:
        """The run in directory ``path``.

        Raises:
            UserError: no run is there, or its files are damaged.
        """
        path = _directory(path)
        if not (path / METRICS).exists() and not (path / EVENTS).exists():
            raise _no_run(path, f"it has neither {METRICS} nor {EVENTS}")
        records = checked_records(path / METRICS, metrics_flaw)
        plugins = path / PLUGINS
        try:
            versions = json.loads(plugins.read_text(encoding="utf-8")) if plugins.exists() else []
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        return cls(
            path,
            cls.read_config(path),
            versions,
            [record for record in records if "loss" in record],
            [record for record in records if "validation_loss" in record],
            cls.read_events(path),
        )

    @staticmethod
    def read_config(path: str | Path) -> dict[str, Any]:
        """The resolved config of the run in directory ``path`` alone, by section; empty where there is none.

        Raises:
            UserError: there is no such directory, or the file is damaged.
        """
        file = _directory(path) / CONFIG
        try:
            return parse_toml(file.read_text(encoding="utf-8")) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None

    @classmethod
    def read_folder(cls, path: str | Path, key: str, default: str) -> Path:
        """The folder below the run's directory ``path`` that its config's ``key`` (``"comm.save_traces_folder"``) names.

        Raises:
            UserError: there is no such directory, or its config is damaged.
        """
        section, _, field = key.partition(".")
        values = cls.read_config(path).get(section, {})
        folder = values.get(field, default) if isinstance(values, dict) else None
        if not isinstance(folder, str):
            raise _unreadable(path, ValueError(f"{key} in its {CONFIG} names no folder"))
        return Path(path) / folder

    @staticmethod
    def read_events(path: str | Path) -> list[dict[str, Any]]:
        """The events of the run in directory ``path`` alone, in order; none where there is no file.

        Raises:
            UserError: there is no such directory, or the file is damaged.
        """
        return checked_records(_directory(path) / EVENTS, event_flaw)

    @property
    def times(self) -> list[float]:
        """When its records were written, in seconds since the epoch; steps first, then validations."""
        return [record["time"] for record in (*self.steps, *self.validations) if record.get("time") is not None]


def _directory(path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise _no_run(path, "there is no such directory")
    return Path(path)


def _no_run(path: str | Path, why: str) -> UserError:
    return UserError.one(f"run {str(path)!r}", why, "give a run's directory (job.dump_folder)")


def _unreadable(path: str | Path, error: Exception) -> UserError:
    return UserError.one(f"run {str(path)!r}", f"cannot be read: {error}", "restore its files")
