"""Hooks between Titan's own packages: pluggy dispatches them like those of the contract, but they are not part of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from titan_core.api import hookspecs
from titan_core.api.hookspecs import PROJECT, hookspec
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.launching import Launcher

if TYPE_CHECKING:
    from titan_core.api import RunEnd
    from titan_core.api.observe.events import NextCommand, Sample


def hook_manager() -> pluggy.PluginManager:
    """Return a manager that knows the hooks of the contract and those of this module."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.add_hookspecs(sys.modules[__name__])
    return manager


@hookspec
def titan_launchers() -> Sequence[Launcher]:  # type: ignore[empty-body]
    """Ways to start the ranks of a job from ``titan train``."""


@hookspec
def titan_job_facts(job: AssembledJob) -> Sequence[JobFact] | None:
    """Return what else is known about an assembled job without building anything; `titan job show` prints it. Called on
    plugin modules only. Must not import torch."""


@hookspec
def titan_sample(sample: Sample) -> None:
    """An observer let the model write a text (:attr:`~titan_core.api.Run.show`). Called on rank 0 only."""


@hookspec(firstresult=True)
def titan_diagnose(run: str, since: float) -> str | None:
    """All ranks of a job have ended, each because it lost contact with another rank and none because of its own error.
    Return one line that explains this from the files in the run directory ``run`` and names the command that shows more, or
    ``None`` if the files do not explain it. Ignore files older than ``since``, the start of the attempt in seconds since the
    epoch.

    The launcher calls this hook and prints the line. It calls plugin modules only: its process has no observers."""


@hookspec
def titan_next_commands(job: AssembledJob, end: RunEnd, command: tuple[str, ...] | None) -> Sequence[NextCommand] | None:
    """The run has ended without an error, and was not interrupted. Return the commands that its user may want next, the most
    useful first; they are printed. Called on rank 0 only, if ``titan train`` started the run.

    Args:
        command: the command that started the run, as the arguments of ``titan``, without secrets; ``None`` if it is unknown,
            because another launcher started the ranks.
    """


@dataclass(frozen=True)
class JobFact:
    """A line of `titan job show` from a plugin (hook ``titan_job_facts``)."""

    name: str
    """A word or two, unique among all facts."""
    text: str
    """One line."""
    value: Any
    """The same as plain values, for ``--json``."""
