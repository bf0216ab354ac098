"""What a subcommand of ``titan`` is run with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_core.api.components import Component
from titan_core.api.config import Config, Override
from titan_core.api.dataset import StepRows
from titan_core.api.job import Job
from titan_core.api.ref import Ref
from titan_core.api.registry import ComponentRegistry


class CommandContext(Protocol):
    """One call of a command: its arguments, and the job that they name."""

    @property
    def arguments(self) -> argparse.Namespace:
        """What the command's own parser read."""
        ...

    @property
    def overrides(self) -> Sequence[Override]:
        """The ``--section.key value`` arguments."""
        ...

    @property
    def override_arguments(self) -> Sequence[str]:
        """The same, as they were written."""
        ...

    @property
    def registry(self) -> ComponentRegistry:
        """All that is installed, plugins that the recipe switches off included."""
        ...

    def config(self, more: Sequence[Override] = ()) -> Config:
        """The config of ``arguments.recipe`` with :attr:`overrides` and ``more``, of which the last one of a key counts.

        Raises:
            UserError: all mistakes in it.
        """
        ...

    def read_data(self, job: Job) -> Iterator[StepRows]:
        """The global batches that ``job`` trains on, in order.

        Raises:
            UserError: a dataset cannot be opened or read.
        """
        ...

    def job(self, world_size: int | None = None, more: Sequence[Override] = ()) -> Job:
        """The job that :meth:`config` assembles to, on ``world_size`` ranks (default: the fewest that it allows).

        Raises:
            UserError: all mistakes in it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Command(Component):
    """A subcommand of ``titan``; a name of two words (``"config show"``) makes a group."""

    kind = "command"
    arguments: Ref[Callable[[argparse.ArgumentParser], None]] | None = None
    """Adds the command's own arguments to its parser."""
    run: Ref[Callable[[CommandContext], int]]
    """Runs it; returns the exit status. Must not import torch unless it trains."""
    overrides: bool = False
    """Whether it takes a recipe and ``--section.key value`` overrides."""
    launches: bool = False
    """Whether it takes the options of the installed launchers (:mod:`titan_core.api.launcher`). ``arguments.launcher`` is
    then the one to start, or ``None``."""
