"""Reads a run's directory for `titan report`, `titan watch`, `titan compare` and similar commands."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.api.config.run_folder import require_below
from titan_core.api.config.toml import parse_toml
from titan_core.toolkit.files import read_bytes, read_text
from titan_core.toolkit.own_files import require_inside
from titan_core.toolkit.plain_json import plain_json
from titan_core.toolkit.processes import is_alive, pid_namespace
from titan_core.toolkit.runs.files import CONFIG, EVENTS, METRICS, PLUGINS
from titan_core.toolkit.runs.record_checks import checked_records, event_flaw, metrics_flaw
from titan_core.toolkit.runs.thinned import SignsOfLife, Thinned


@dataclass(frozen=True)
class RunLog:
    """The files that a run has written so far. The run may still be running, or may have been killed at any time."""

    path: Path
    """The run's directory."""
    config: dict[str, Any]
    """The resolved config, by section."""
    plugins: list[dict[str, str]]
    """Versions of the plugins."""
    steps: list[dict[str, Any]]
    """Records of logged steps, in order; of a long run those that :class:`.thinned.Thinned` keeps."""
    validations: list[dict[str, Any]]
    """Records of validations, likewise. That of a step has the figures of its named validations too, such as
    ``validation_loss/averaged``."""
    events: list[dict[str, Any]]
    """Events of all attempts, such as starts, checkpoints and ends (:mod:`titan_core.runlog.event_log`), in order."""
    even_steps: list[dict[str, Any]] = field(default_factory=list)
    """Those of :attr:`steps` that are evenly spaced, for medians."""
    times: list[float] = field(default_factory=list)
    """Times of the records in seconds since the epoch, as far as :class:`~titan_core.toolkit.runs.thinned.SignsOfLife` keeps
    them."""
    skipped: int = 0
    """Number of lines in its files that are too long, or nested too deeply, to be read."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Other records, such as the scores of tasks, likewise."""

    @classmethod
    def read(cls, path: str | Path) -> RunLog:
        """Read the run in directory ``path``.

        Raises:
            UserError: ``path`` is not a run's directory, or its files are damaged.
        """
        path = _directory(path)
        if not (path / METRICS).exists() and not (path / EVENTS).exists():
            raise _no_run(path, f"has neither {METRICS} nor {EVENTS}")
        skipped: list[int] = []
        events = list(checked_records(path / EVENTS, event_flaw, skipped.append))
        signs = SignsOfLife([event["time"] for event in events if event["event"] == "start"])
        steps, validations, evaluations = Thinned(), Thinned(), Thinned()
        validation: dict[str, Any] = {}  # the latest, to which those of a name belong
        for record in checked_records(path / METRICS, metrics_flaw, skipped.append):
            if "loss" in record:
                steps.add(record)
            if "validation_loss" in record:
                validations.add(validation := record)
            elif any(key.startswith("validation_loss/") for key in record):
                if record["step"] == validation.get("step"):
                    validation.update(record)
            elif "loss" not in record:
                evaluations.add(record)
            if record.get("time") is not None:
                signs.add(record["time"])
        plugins = path / PLUGINS
        try:
            versions = plain_json(read_bytes(plugins, inside=path)) if plugins.exists() else []
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        return cls(
            path,
            cls.read_config(path),
            versions,
            steps.records,
            validations.records,
            events,
            steps.even,
            signs.times,
            len(skipped),
            evaluations.records,
        )

    @staticmethod
    def read_config(path: str | Path) -> dict[str, Any]:
        """Read only the resolved config of the run in directory ``path``, by section; empty if the file does not exist.

        Raises:
            UserError: the directory does not exist, or the file is damaged.
        """
        file = _directory(path) / CONFIG
        try:
            return parse_toml(read_text(file, inside=file.parent)) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None

    @classmethod
    def read_folder(cls, path: str | Path, key: str, default: str) -> Path:
        """Return the folder that ``key`` (such as ``"comm.save_traces_folder"``) of the run's config names.

        Args:
            path: the run's directory.
            key: key of a folder relative to ``path``.
            default: the folder if the config lacks the key.

        Raises:
            UserError: the directory does not exist, or its config is damaged.
        """
        section, _, field = key.partition(".")
        values = cls.read_config(path).get(section, {})
        folder = values.get(field, default) if isinstance(values, dict) else None
        try:
            below = require_below(folder)
        except (TypeError, ValueError) as error:
            raise _unreadable(path, ValueError(f"{key} in its {CONFIG} {error}")) from None
        require_inside(Path(path), [below])
        return Path(path) / below

    @staticmethod
    def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
        """Yield all records of the run in directory ``path``, in order; none if the file does not exist. Lines that are too
        long, or nested too deeply, are left out.

        Raises:
            UserError: the directory does not exist, or the file is damaged.
        """
        return checked_records(_directory(path) / METRICS, metrics_flaw, skipped=lambda number: None)

    @staticmethod
    def read_events(path: str | Path) -> list[dict[str, Any]]:
        """Read only the events of the run in directory ``path``, in order; empty if the file does not exist.

        Raises:
            UserError: the directory does not exist, or the file is damaged.
        """
        return list(checked_records(_directory(path) / EVENTS, event_flaw))


def processes_are_gone(start: Mapping[str, Any]) -> bool:
    """Whether the first rank's process in a ``start`` event no longer exists. ``False`` if it is not visible from here."""
    processes = start.get("processes") or []
    if not processes or not isinstance(processes[0], Mapping) or processes[0].get("host") != socket.gethostname():
        return False
    own = pid_namespace()
    pid = processes[0].get("pid")
    if own is None or processes[0].get("pid_namespace") != own or not isinstance(pid, int) or pid <= 0:
        return False  # containers on one host may each have their own process ids
    return not is_alive(pid)


def _directory(path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise _no_run(path, "no such directory")
    return Path(path)


def _no_run(path: str | Path, why: str) -> UserError:
    return UserError.one(f"run {str(path)!r}", why, "pass a run's directory (job.dump_folder)")


def _unreadable(path: str | Path, error: Exception) -> UserError:
    return UserError.one(f"run {str(path)!r}", f"cannot be read: {error}", "restore the run's files")
