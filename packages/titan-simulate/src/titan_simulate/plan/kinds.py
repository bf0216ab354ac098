"""Kinds of blocks: what decides the operators of a block, and the small jobs whose traces show them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from titan_core.api import MeshPlan, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.text import show

if TYPE_CHECKING:
    from titan_simulate.engine.simulate import Train
    from titan_simulate.engine.stub_libraries import Device
    from titan_simulate.estimate.traced_rank import TracedRank

LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
JobOn = Callable[[int, Sequence[Override]], AssembledJob]
"""(number of ranks, overrides) -> the recipe's job."""


@dataclass(frozen=True)
class Kind:
    """What decides the operators of a block, and differs between the jobs of a plan."""

    degrees: tuple[tuple[str, int], ...]
    """Config key -> degree, of the dimensions that divide sequences or weights, and of views."""
    chosen: tuple[tuple[str, Any], ...]
    """Config key -> value, of transforms that change blocks."""
    sharded: bool = True
    """Whether data parallelism shards parameters."""

    def __post_init__(self) -> None:
        # Plans have tens of thousands of kinds, and look each of them up for each one that they trace.
        object.__setattr__(self, "_hash", hash((self.degrees, self.chosen, self.sharded)))

    def __hash__(self) -> int:
        return cast(int, self.__dict__["_hash"])

    @property
    def where(self) -> tuple[object, ...]:
        """What of it the mesh decides."""
        return (*self.degrees, self.sharded)

    def ranks(self, divided: Collection[str]) -> int:
        """Return the number of ranks that divide a block along the dimensions whose degree keys are ``divided``."""
        return math.prod(degree for key, degree in self.degrees if key in divided)


@dataclass(frozen=True)
class Rules:
    """How the blocks of kinds are related."""

    divided: Collection[str]
    """Degree keys of the dimensions that divide a block."""
    weights: Collection[str]
    """Those of the dimensions that divide its weights."""
    exchanged: Collection[str]
    """Those of views along which ranks only exchange activations."""
    experts: Collection[str]
    """Those of views that divide experts."""
    faster_first: Mapping[str, Sequence[Any]]
    """Config key -> values of which each later one adds work."""


def small_job(mesh: MeshPlan, kind: Kind, batch: int) -> tuple[int, list[Override]]:
    """Return the number of ranks, and the overrides of the recipe, of a small job with blocks of ``kind`` on
    :func:`~titan_simulate.plan.meshes.smallest_mesh`, that has one microbatch of ``batch`` sequences."""
    values: dict[str, Any] = {dim.degree_key: mesh.degrees[dim.name] for dim in mesh.dims}
    values |= {view.degree_key: mesh.view_degrees[view.name] for view in mesh.views}
    values |= {**dict(kind.chosen), LOCAL_BATCH: batch, GLOBAL_BATCH: batch * mesh.batch_degree}
    return mesh.world_size, [Override(key, text_of(value)) for key, value in values.items()]


def text_of(value: Any) -> str:
    """Return a value as an override has it."""
    return "none" if value is None else value if isinstance(value, str) else show(value)


SmallJob = tuple[int, Sequence[Override], int]
"""Number of ranks, overrides of the recipe, most blocks that are simulated."""
Taken = Any
"""A :class:`~titan_simulate.estimate.traced_rank.TracedRank`, or a UserError or text that says why there is none."""


def take_all(job_on: JobOn, train: Train, device: Device, jobs: Sequence[SmallJob]) -> list[TracedRank | UserError | str]:
    """Return the traces of small jobs, each made in a fork of this process."""
    from titan_simulate.engine import forks

    return forks.call_in_forks(
        [partial(_take, job_on, train, device, *job) for job in jobs], at_once=len(os.sched_getaffinity(0))
    )


def _take(
    job_on: JobOn, train: Train, device: Device, ranks: int, overrides: Sequence[Override], blocks: int
) -> TracedRank | UserError | str:
    from titan_simulate.estimate.traced_rank import take

    try:
        return take(
            lambda more: job_on(ranks, [*overrides, *more]), train, 0, blocks, device, {"data.logical_shards": "0"},
            lambda job: job, None, short=0, checks_model=False, repeating=blocks,
        )  # fmt: skip
    except UserError as error:
        return error
    except Exception as error:  # noqa: BLE001 - one that cannot be simulated is reported among the losers
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
