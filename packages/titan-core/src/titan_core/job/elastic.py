"""From a recipe to a job. Elastic jobs: how a config adapts to the number of ranks while what it trains stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from titan_core.api import Config, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import JobSection, TrainingSection
from titan_core.api.config.toml import parse_toml
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import RawConfig, load_config
from titan_core.config.overrides import AnyOverride
from titan_core.config.stages import in_stage
from titan_core.job.assemble import assemble, mesh_of
from titan_core.job.stages import with_stages
from titan_core.plugins.registry import Components
from titan_core.toolkit.files import read_text
from titan_core.toolkit.runs.files import CONFIG


def load_job(
    recipe: str | Config | RawConfig,
    overrides: Sequence[AnyOverride],
    registry: Components,
    world_size: int | None,
    missing_ok: bool = False,
) -> AssembledJob:
    """Return the job of ``recipe``, adapted to ``world_size`` ranks if it is elastic.

    Args:
        recipe: see :func:`~titan_core.config.load.load_config`.
        world_size: see :func:`~titan_core.job.assemble.assemble`.
        missing_ok: likewise.

    Raises:
        UserError: the config or the job is invalid.
    """
    config, used = load_config(recipe, overrides, registry)
    if world_size is None or not config.section(TrainingSection).elastic:
        if world_size is None and config.stages:  # the smallest number on which all stages may run
            configs = (config, *(stage.config for stage in config.stages))
            world_size = max(mesh_of(one, used, None).world_size for one in configs)
        return with_stages(assemble(config, used, world_size, missing_ok=missing_ok), used, missing_ok)
    found: list[UserError] = []
    for more in adaptations(config, used, world_size):
        try:
            config, used = load_config(recipe, [*overrides, *more], registry)
            return with_stages(assemble(config, used, world_size, missing_ok=missing_ok), used, missing_ok)
        except UserError as error:
            found.append(error)
    raise found[0]


def changed_stage(
    job: AssembledJob, number: int, overrides: Sequence[AnyOverride], world_size: int, missing_ok: bool = False
) -> AssembledJob:
    """Return the job of stage ``number`` of ``job``, which is that of the first stage, with ``overrides`` of this stage, on
    ``world_size`` ranks. It does not adapt to their number.

    Args:
        missing_ok: see :func:`~titan_core.job.assemble.assemble`.

    Raises:
        UserError: the stage is invalid with them.
    """
    assert isinstance(job.registry, Components)
    stage = job.stages[number]
    try:
        config, registry = load_config(replace(stage.config, stages=()), overrides, job.registry)
        # With the name of a stage: checks of a schedule that need all steps of the run leave them to the run's own assembly.
        found = assemble(replace(config, stage=stage.name), registry, world_size, missing_ok=missing_ok)
    except UserError as error:
        raise in_stage(error, stage.name) from None
    return replace(found, stages=job.stages, stage=number)


def adaptations(config: Config, registry: Components, ranks: int) -> list[list[Override]]:
    """Return the overrides with which ``config`` trains on ``ranks`` ranks, the largest local batch first. Not all of them
    need to be possible: a pipeline, for example, may need an even local batch.

    Raises:
        UserError: the degrees contradict each other.
    """
    training, smallest = config.section(TrainingSection), mesh_of(config, registry, None)
    taking = [dim for dim in smallest.dims if dim.takes_rest and config.value(dim.degree_key) < 0]
    replicates = [dim for dim in smallest.dims if dim.divides == "batch" and dim.name in smallest.data_dims("replicate")]
    if not taking and not replicates:
        return [[]]  # no dimension can adapt
    adapts = taking[0] if taking else replicates[-1]
    degree, rest = divmod(ranks, smallest.world_size // smallest.degrees[adapts.name])
    if rest or not degree:
        return [[]]  # assembly says why
    fixed = [Override(adapts.degree_key, str(degree))] if not taking else []
    groups = smallest.batch_degree // smallest.degrees[adapts.name] * degree
    size = training.global_batch_size
    if size < 0:
        size = _batch_of_run(config) or training.local_batch_size * groups
        fixed.append(Override("training.global_batch_size", str(size)))
    share = size // groups if size % groups == 0 else 1
    locals_ = [local for local in range(training.local_batch_size, 0, -1) if share % local == 0]
    return [[*fixed, Override("training.local_batch_size", str(local))] for local in locals_]


def _batch_of_run(config: Config) -> int:
    """Return the global batch of the elastic run in the run's directory; 0 if there is none."""
    training: dict[str, object] = {}
    with suppress(OSError, ValueError):
        folder = Path(config.section(JobSection).dump_folder)
        training = parse_toml(read_text(folder / CONFIG)).get("training", {})
    size = training.get("global_batch_size", 0) if training.get("elastic") else 0
    return size if isinstance(size, int) and size > 0 else 0
