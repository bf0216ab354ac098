"""The context of one call of a command."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from titan_core.api import Config, Model, Recipe, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import DataSection
from titan_core.api.data.replay import DataReplay, StepRows
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.cli.stored_models import InstalledModels
from titan_core.config.load import RawConfig, load_config
from titan_core.job.assemble import pick_model
from titan_core.job.elastic import changed_stage, load_job
from titan_core.job.stages import job_of_stage
from titan_core.plugins.registry import Components

if TYPE_CHECKING:
    from titan_core.api import RunEnd


def default_recipe(registry: Components) -> str:
    """Return the recipe for a command line without one: the only default recipe of the installed plugins.

    Raises:
        UserError: there is no default recipe, or there are several.
    """
    names = list(dict.fromkeys(recipe.name for recipe in registry.all(Recipe) if recipe.default))
    if len(names) == 1:
        return names[0]
    why = (
        f"several plugins have a default recipe: {', '.join(names)}" if names else "no installed plugin has a default recipe"
    )
    raise UserError.one("command line: RECIPE|FILE", why, "name a recipe (see `titan recipes`) or a TOML file")


@dataclass(frozen=True)
class Invocation:
    """See :class:`titan_core.api.CommandContext`."""

    arguments: argparse.Namespace
    registry: Components
    overrides: Sequence[Override] = ()
    override_arguments: Sequence[str] = ()
    rank_arguments: Sequence[str] = ()
    recipe: RawConfig | None = None
    """In place of ``arguments.recipe``."""

    @property
    def models(self) -> InstalledModels:
        """See :attr:`titan_core.api.CommandContext.models`."""
        return InstalledModels(self.registry, self.overrides)

    def config(self, more: Sequence[Override] = ()) -> Config:
        """See :meth:`titan_core.api.CommandContext.config`."""
        return self._loaded(more)[0]

    def with_recipe(self, source: str, tables: Mapping[str, Mapping[str, Any]]) -> Invocation:
        """See :meth:`titan_core.api.CommandContext.with_recipe`."""
        return replace(
            self, recipe=RawConfig(source, Path(source).name, {name: dict(table) for name, table in tables.items()})
        )

    def model(self) -> tuple[Model, BaseModel]:
        """See :meth:`titan_core.api.CommandContext.model`."""
        return pick_model(*self._loaded(()))

    def read_data(self, job: AssembledJob) -> Iterator[StepRows]:
        """See :meth:`titan_core.api.CommandContext.read_data`."""
        from titan_core.data.shards import ShardGroup
        from titan_core.data.streams import open_sources

        spec = job.data
        group = ShardGroup(spec, open_sources(spec), job.text_tokenizer, range(spec.plan.logical_shards))
        while (rows := group.read()) is not None:
            yield rows

    def replay(self, job: AssembledJob) -> DataReplay:
        """See :meth:`titan_core.api.CommandContext.replay`."""
        from titan_core.data.replay import Replay
        from titan_core.data.streams import open_sources

        mask = job.config.section(DataSection).document_mask
        return Replay(job.data, open_sources(job.data), job.text_tokenizer, mask)

    def stages(self, job: AssembledJob) -> list[AssembledJob]:
        """See :meth:`titan_core.api.CommandContext.stages`."""
        return [job_of_stage(job, number) for number in range(max(1, len(job.stages)))]

    def stage(
        self,
        job: AssembledJob,
        number: int,
        more: Sequence[Override] = (),
        missing_ok: bool = False,
        world_size: int | None = None,
    ) -> AssembledJob:
        """See :meth:`titan_core.api.CommandContext.stage`."""
        size = job.mesh.world_size if world_size is None else world_size
        if not more and size == job.mesh.world_size:
            return job_of_stage(job, number, missing_ok)
        return changed_stage(job, number, more, size, missing_ok)

    def job(self, world_size: int | None = None, more: Sequence[Override] = (), missing_ok: bool = False) -> AssembledJob:
        """See :meth:`titan_core.api.CommandContext.job`."""
        return load_job(
            self.recipe or self.arguments.recipe, [*self.overrides, *more], self.registry, world_size, missing_ok
        )

    def train(self, job: AssembledJob, observers: Iterable[object] = ()) -> RunEnd:
        """See :meth:`titan_core.api.CommandContext.train`."""
        from titan_core.loop.training import train

        return train(job, observers)

    def _loaded(self, more: Sequence[Override]) -> tuple[Config, Components]:
        return load_config(self.recipe or self.arguments.recipe, [*self.overrides, *more], self.registry)
