"""One call of a command, as the command sees it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from titan_core.api.config import Config, Override
from titan_core.api.job import Job
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.registry import Registry


@dataclass(frozen=True)
class Invocation:
    """See :class:`titan_core.api.command.CommandContext`."""

    arguments: argparse.Namespace
    registry: Registry
    overrides: Sequence[Override] = ()
    override_arguments: Sequence[str] = ()

    def config(self, more: Sequence[Override] = ()) -> Config:
        """See :meth:`titan_core.api.command.CommandContext.config`."""
        return self._loaded(more)[0]

    def job(self, world_size: int | None = None, more: Sequence[Override] = ()) -> Job:
        """See :meth:`titan_core.api.command.CommandContext.job`."""
        return assemble(*self._loaded(more), world_size)

    def _loaded(self, more: Sequence[Override]) -> tuple[Config, Registry]:
        return load_config(self.arguments.recipe, [*self.overrides, *more], self.registry)
