"""The config keys of titan-experts, their checks, what planning a job needs to know of them, and the slot for another
plugin's dispatch. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import Field

from titan_core.api import (
    ALL_KEYS,
    Costs,
    Experts,
    JobContext,
    MeshPlan,
    NonNegativeFloat,
    PositiveFloat,
    Problem,
    Ranks,
    Ref,
    Replicate,
    Router,
    Section,
    Slot,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titan_experts.dispatch import Dispatch

VIEW: Final = "ep"
"""Name of the view of the mesh whose ranks divide the experts."""


class ExpertParallelKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    expert_parallel_degree: Ranks = Field(default=1, gt=0)
    """Number of ranks that the experts of each block are divided over. These are ranks of data, context and tensor
    parallelism: the degree must divide data_parallel_shard_degree x context_parallel_degree x tensor_parallel_degree,
    without the last one if disable_sequence_parallel is true."""
    expert_parallel_dispatch: Literal["alltoall", "device"] = "alltoall"
    """How rows reach their experts. "alltoall": exactly as many as there are, for which the host waits once in each block.
    "device": buffers of fixed size and no wait, so that the device never idles, but more bytes are sent and held."""
    expert_parallel_capacity: PositiveFloat | None = None
    """With dispatch "device": rows that each rank can send to each other rank, as a multiple of an even share. If a rank has
    more, the loss of the step is not a number, and training.on_nan decides; nothing is dropped. Default: what suffices for
    any choice of experts, at most the degree."""


class ExpertsSection(Section):
    section: ClassVar[str] = "experts"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    balance: Literal["none", "sequence", "global", "bias"] = "none"
    """What keeps the experts of a block equally busy. "sequence": a loss for each sequence (arXiv 2412.19437, equations 17
    to 20). "global": a loss that compares with the rows of the experts in the whole batch of the previous step. "bias": no
    loss; after each step, a bias of the choice rises for experts with fewer rows than the mean, and falls for others (arXiv
    2408.15664)."""
    balance_weight: PositiveFloat = 0.001
    """Factor of the loss "sequence" or "global", which is 1 in each block if all experts are equally busy."""
    bias_rate: PositiveFloat = 0.001
    """How much "bias" changes the bias of an expert in a step."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Factor of a loss that keeps the logits of routers small: in each block, the mean over positions of the square of their
    log-sum-exp (arXiv 2202.08906, equation 5). 0.0: no such loss."""
    metrics: bool = True
    """Count the rows of the experts of a model with routers, and report how busy they are."""
    force_balanced: bool = False
    """Choose the experts by turns, whatever the scores. For measurements of speed only: the model cannot learn to choose."""


DEGREE = "parallelism.expert_parallel_degree"
CAPACITY = "parallelism.expert_parallel_capacity"


def folded(mesh: MeshPlan) -> tuple[str, ...]:
    """Return the dimensions that divide weights and among whose ranks the experts are divided."""
    return next(mesh.folded(view) for view in mesh.views if view.name == VIEW)


def check(context: JobContext[ExpertParallelKeys]) -> Iterator[Problem]:
    """Require a model with experts that tensor parallelism does not divide among the same ranks, and a dispatch that has a
    capacity if one is set."""
    if not any(isinstance(rule, Experts) for rule in context.job.model.layout.rules.values()):
        why = f"model {context.job.model_name!r} has no experts that can be divided: no rule of its layout is Experts"
        yield context.config.problem(DEGREE, why, "set it to 1")
    shared, rules = folded(context.job.mesh), context.job.model.layout.rules
    inside = [pattern for pattern, rule in rules.items() if isinstance(rule, Experts) and rule.within != Replicate()]
    if shared and inside:
        why = f"its ranks include those of {shared[0]}, among which the rule for {inside[0]!r} divides each expert"
        yield context.config.problem(DEGREE, why, "set it to 1, or parallelism.tensor_parallel_degree = 1")
    if context.section.expert_parallel_capacity is not None and context.section.expert_parallel_dispatch != "device":
        why = 'dispatch "alltoall" sends as many rows as there are'
        yield context.config.problem(CAPACITY, why, 'remove it, or set parallelism.expert_parallel_dispatch = "device"')


DISPATCH_KEY = "parallelism.expert_parallel_dispatch"


def choices(context: JobContext[ExpertParallelKeys]) -> Mapping[str, Sequence[Any]]:
    """Return both ways of sending rows, if ranks divide the experts. A capacity needs one of them."""
    if context.section.expert_parallel_degree == 1:
        return {}
    fixed = context.section.expert_parallel_capacity is not None
    return {DISPATCH_KEY: ("device",) if fixed else ("alltoall", "device")}


def costs(context: JobContext[ExpertParallelKeys]) -> Costs:
    """Return what a dispatch costs: a wait of the host, or places that stay empty."""
    keys = context.section
    if keys.expert_parallel_dispatch == "alltoall":
        return Costs(host_waits=1.0)
    routers = context.job.model.layout.routers.values()
    share = max((most_share(router, keys) for router in routers), default=most_share(None, keys))
    return Costs(exchanged_rows=keys.expert_parallel_degree * share)


def most_share(router: Router | None, keys: ExpertParallelKeys) -> float:
    """Return the largest share of its rows that a rank can send to one rank, with the dispatch "device".

    By default, the largest number that any choice can require: a token passes through at most as many experts of a rank as
    there are, and at most as many as it chooses.
    """
    ranks = keys.expert_parallel_degree
    share = min(1.0, (keys.expert_parallel_capacity or ranks) / ranks)
    if router is None:
        return share
    return min(share, min(router.per_token, router.experts // ranks) / router.per_token)


DISPATCH: Slot[Callable[[DeviceMesh], Dispatch]] = Slot(
    name="titan_experts.dispatch",
    summary="module of experts -> (mesh of the ranks that divide them) -> what sends rows to their experts and back",
    accepts=Ref("titan_experts.config:function"),
)


def function(value: object) -> Callable[[DeviceMesh], Dispatch]:
    """Return ``value`` if it is a function.

    Raises:
        TypeError: it is not.
    """
    if not callable(value):
        raise TypeError(f"it must be a function of a mesh, not {value!r}")
    return value
