"""Subcommands of ``titan`` and the context they run with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from titan_core.api.checkpoint.stored_model import StoredModels
from titan_core.api.commands.registry import Registry
from titan_core.api.config.resolved import Config, Override
from titan_core.api.data.replay import DataReplay, StepRows
from titan_core.api.model.components import Model
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.component import Component
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    from titan_core.api.observe.events import RunEnd


class CommandContext(Protocol):
    """One invocation of a command: its arguments, and the job that they describe."""

    @property
    def arguments(self) -> argparse.Namespace:
        """The arguments that the command's own parser read."""

    @property
    def overrides(self) -> Sequence[Override]:
        """The ``--section.key value`` arguments."""

    @property
    def override_arguments(self) -> Sequence[str]:
        """The ``--section.key value`` arguments, as the user wrote them."""

    @property
    def registry(self) -> Registry:
        """All installed components, including those of plugins that the recipe disables."""

    def config(self, more: Sequence[Override] = ()) -> Config:
        """Return the config of ``arguments.recipe`` with :attr:`overrides` and then ``more`` applied; the last override of a
        key wins.

        Raises:
            UserError: lists all mistakes in the config.
        """

    def with_recipe(self, source: str, tables: Mapping[str, Mapping[str, Any]]) -> CommandContext:
        """Return this context with the recipe ``tables`` in place of ``arguments.recipe``, under the same overrides.

        Args:
            source: where the recipe comes from, for error messages. Its last part names the default run directory.
            tables: section -> key -> value, as in TOML.
        """

    def model(self) -> tuple[Model, BaseModel]:
        """Return the model that :meth:`config` describes, and its arguments, without assembling a job: neither the
        tokenizer nor the data needs to exist.

        Raises:
            UserError: the model is not installed, or rejects its flavor or arguments.
        """

    @property
    def models(self) -> StoredModels:
        """Access to models with trained weights."""

    @property
    def rank_arguments(self) -> Sequence[str]:
        """The command line after ``titan`` of each rank that a launcher starts: this one without the launcher's options."""

    def read_data(self, job: AssembledJob) -> Iterator[StepRows]:
        """Return the global batches that ``job`` trains on, in order.

        Raises:
            UserError: a dataset cannot be opened or read.
        """

    def replay(self, job: AssembledJob) -> DataReplay:
        """Open the data that ``job`` trains on, to read the steps of a run again.

        Raises:
            UserError: a dataset cannot be opened.
        """

    def stages(self, job: AssembledJob) -> list[AssembledJob]:
        """Return the jobs of all stages of the run that begins with ``job``: ``[job]`` if it has only one.

        Raises:
            UserError: this machine lacks a file that a stage needs.
        """

    def stage(
        self,
        job: AssembledJob,
        number: int,
        more: Sequence[Override] = (),
        missing_ok: bool = False,
        world_size: int | None = None,
    ) -> AssembledJob:
        """Return the job of stage ``number`` of the run that begins with ``job``, which is that of the first one (0).

        Args:
            more: overrides of this stage, which replace what it sets itself.
            missing_ok: see :meth:`job`.
            world_size: number of ranks (default: that of ``job``).

        Raises:
            UserError: the stage is invalid with these overrides, or this machine lacks a file that it needs.
        """

    def job(self, world_size: int | None = None, more: Sequence[Override] = (), missing_ok: bool = False) -> AssembledJob:
        """Return the job that :meth:`config` assembles to, on ``world_size`` ranks (default: the smallest possible number).

        Args:
            missing_ok: for commands that only look at the job: files that this machine lacks are listed in
                :attr:`~titan_core.api.plugins.assembled_job.AssembledJob.missing` instead of raised.

        Raises:
            UserError: lists all mistakes in the job.
        """

    def train(self, job: AssembledJob, observers: Iterable[object] = ()) -> RunEnd:
        """Train ``job`` in this process, with ``observers`` that have lifecycle hooks. Imports torch.

        Raises:
            UserError: a mistake that only the hardware or the data reveals.
        """


@dataclass(frozen=True, kw_only=True)
class Command(Component):
    """A subcommand of ``titan``. A name of two words (``"config show"``) defines a group."""

    kind = "command"
    arguments: Ref[Callable[[argparse.ArgumentParser], None]] | None = None
    """Adds the command's own arguments to its parser."""
    run: Ref[Callable[[CommandContext], int]]
    """Runs the command and returns the exit status. Must not import torch unless it trains."""
    group: str = "plugins"
    """The heading under which ``titan --help`` lists it: ``train``, ``look``, ``data and models``, ``plan``, ``clusters`` or
    ``plugins``; another one follows these."""
    rare: bool = False
    """Whether only ``titan --help-all`` lists it."""
    overrides: bool = False
    """Whether it takes a recipe and ``--section.key value`` overrides."""
    launches: bool = False
    """Whether it takes the options of the installed launchers (:mod:`titan_core.toolkit.launching`). If so,
    ``arguments.launcher`` is the launcher to start, or ``None``."""
