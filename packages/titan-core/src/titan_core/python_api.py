"""The Python API: for scripts and notebooks, what ``titan train`` and its neighbours do. Errors are exceptions, and a call
leaves its process as it was.

Imported when :mod:`titan_core` is first asked for one of these names. Imports no torch before a job trains.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import Config, StepReport, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config import load
from titan_core.config.overrides import TypedOverride
from titan_core.job.elastic import load_job
from titan_core.loop.gc_settings import free_job
from titan_core.plugins.registry import Components
from titan_core.toolkit.launching import place_in_environment
from titan_core.toolkit.plugin_files import using_plugin_files as using_plugin_files
from titan_core.toolkit.random_state import same_generators
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.status import progress_as_before

if TYPE_CHECKING:
    from titan_core.api import RunEnd

Recipe = str | os.PathLike[str] | Config
"""The name of a recipe, the path of a TOML file, or a config."""


def train(
    recipe: Recipe,
    overrides: Mapping[str, Any] | None = None,
    *,
    on_step: Callable[[StepReport], object] | None = None,
) -> RunEnd:
    """Train ``recipe`` in this process, alone or as one of the ranks that a launcher such as torchrun has started, and
    return how the run ended.

    Afterwards the process is as before: its random generators, environment, signal handlers, process groups and garbage
    collector.

    Args:
        overrides: values of dotted keys, such as ``{"training.steps": 100}``.
        on_step: called after each step, on each rank. It must leave the tensors of the report as they are.

    Raises:
        UserError: a mistake in the config, the data or the machine.
        RunStopped: the run stopped itself, because its loss is not finite for example.
    """
    _, world_size = place_in_environment()
    job = load_job(_given(recipe), _typed(overrides), Components.from_installed(), world_size)
    from titan_core.loop import training  # imports torch

    with _process_as_before():
        return training.train(job, [] if on_step is None else [_OnStep(on_step)])


def load_config(recipe: Recipe, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the validated config of ``recipe``, with ``overrides``.

    Raises:
        UserError: the config is invalid. Lists all problems at once if possible.
    """
    return load.load_config(_given(recipe), _typed(overrides), Components.from_installed())[0]


def assemble(config: Config, world_size: int | None = None) -> AssembledJob:
    """Return the job that ``config`` describes: its components, mesh and batch.

    Args:
        world_size: number of ranks (default: the fewest that the config allows).

    Raises:
        UserError: the job is invalid. Lists every problem found.
    """
    return load_job(config, (), Components.from_installed(), world_size)


@dataclass(frozen=True)
class RunFiles:
    """What a run has written so far."""

    folder: Path
    config: dict[str, dict[str, Any]]
    """The resolved config, by section."""
    metrics: dict[str, list[Any]]
    """The metrics by name, for example ``loss``: one value for each step that was logged or validated, ``None`` where there
    is none."""
    events: list[dict[str, Any]]
    """Starts, checkpoints, findings, samples and ends of all attempts, in order."""


def read_run(folder: str | os.PathLike[str]) -> RunFiles:
    """Read the files of a run, which may still be running.

    Raises:
        UserError: ``folder`` is not a run's directory, or its files are damaged.
    """
    path = Path(folder)
    rows: dict[int, dict[str, Any]] = {}
    for record in RunLog.read_metrics(path):
        row = rows.setdefault(record["step"], {})
        row.update({name: value for name, value in record.items() if name not in row})  # a step's line, then its validation
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = {name: [row.get(name) for row in rows.values()] for name in names}
    return RunFiles(path, RunLog.read_config(path), columns, RunLog.read_events(path))


def _given(recipe: Recipe) -> str | Config:
    return recipe if isinstance(recipe, Config) else os.fspath(recipe)


def _typed(overrides: Mapping[str, Any] | None) -> list[TypedOverride]:
    """Return ``overrides`` with paths as text, which all keys of paths take."""
    values = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in (overrides or {}).items()}
    return [TypedOverride(key, value) for key, value in values.items()]


class _OnStep:
    """Calls a function of the caller's after each step."""

    is_foreign = True  # the lifecycle checks that it changes no tensor

    def __init__(self, function: Callable[[StepReport], object]) -> None:
        self._function = function

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Call the function."""
        self._function(report)

    def __repr__(self) -> str:
        return f"on_step={self._function!r}"


@contextmanager
def _process_as_before() -> Iterator[None]:
    """Undo what a job does to its process, beyond what the trainer itself undoes."""
    before, hook = dict(os.environ), sys.excepthook
    try:
        with same_generators(), progress_as_before():
            yield
    finally:
        sys.excepthook = hook  # torch's, which a process group installs, would go on naming a rank
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
        free_job()
