"""Memory and time of a job, composed of the costs of its blocks. Free of torch.

A rank's step is its microbatches, each the sum of its blocks, embedding and head; what data parallelism adds to that, as far
as computation does not hide it; what is done once; and what a pipeline's rank waits. Its memory is what is in use at the
worst moment: state, the parts of the trace, and what each further block and each further microbatch keeps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_core.api import MeshPlan, PipelineCosts, UserError
from titan_simulate.plan.candidates import Candidate
from titan_simulate.plan.kind_costs import REDUCTIONS, DataParallel, KindCosts, Moment, Passes
from titan_simulate.plan.kinds import Kind
from titan_simulate.plan.traced_kind import HEAD, OTHERS

GIB = 2**30
STATE = "parameters, gradients, optimizer"
DATA_PARALLEL = "data parallelism"


@dataclass(frozen=True)
class Arrangement:
    """How a job arranges blocks of a kind on ranks, and its batch in microbatches."""

    batch: int
    """Sequences of a microbatch."""
    microbatches: int
    data: DataParallel
    parameters_stay: bool = False
    """Whether parameters stay gathered between forward and backward; in a pipeline, for the whole step."""
    gradients_stay: bool = False
    """Whether gradients are reduced after the last microbatch only."""
    width: float = 1.0
    """Bytes of a gathered parameter, by those of its gradient before it is reduced."""
    pipeline: PipelineCosts | None = None


@dataclass(frozen=True)
class RankShares:
    """What a rank of a job has of what a rank of a traced kind has, from which that of the job descends."""

    work: float = 1.0
    """Of a block's operators and activations."""
    weights: float = 1.0


@dataclass(frozen=True)
class Worth:
    """Which jobs are worth finding what data parallelism adds to their step. The others lose without it."""

    seconds: float = math.inf
    """Those that take less without it."""
    gib: float = math.inf
    """Those that need no more memory."""


ANY = Worth()


@dataclass(frozen=True)
class Composition:
    """What a step of the worst rank needs."""

    memory: Mapping[str, float]
    """Bytes by kind."""
    seconds: Mapping[str, float]
    """By kind; groups of ranks for collectives that nothing hides."""

    @property
    def peak_gib(self) -> float:
        """Memory of the worst rank."""
        return sum(self.memory.values()) / GIB

    @property
    def step_seconds(self) -> float:
        """Duration of a step."""
        return sum(self.seconds.values())


def holdings(classes: Mapping[str, int], pipeline: PipelineCosts | None) -> list[tuple[int, Counter[int]]]:
    """Return what differs of what the ranks of a pipeline hold: (a rank, its blocks by class, and the embedding and head).

    Args:
        classes: name of each block -> its class.
    """
    if pipeline is None:
        return [(0, Counter([*classes.values(), OTHERS, HEAD]))]
    ranks: dict[int, Counter[int]] = {}
    for stage, rank in zip(pipeline.stages, pipeline.rank_of, strict=True):
        ranks.setdefault(rank, Counter()).update(classes[name] for name in stage if name in classes)
    ranks[pipeline.rank_of[0]][OTHERS] = 1
    ranks[pipeline.rank_of[-1]][HEAD] = 1
    found: dict[tuple[tuple[int, int], ...], int] = {}
    for rank, held in ranks.items():
        same = tuple(sorted(held.items()))
        if same not in found or pipeline.alive[found[same]] < pipeline.alive[rank]:
            found[same] = rank
    return [(rank, Counter(dict(held))) for held, rank in found.items()]


def least_seconds(costs: KindCosts, blocks: Mapping[int, int], batch: int, one_expert: bool = False) -> float:
    """Return the time in which ranks of a kind run forward and backward of a microbatch on ``blocks``, without what data
    parallelism adds: less than that no job of the kind takes, however it arranges its blocks.

    Ranks of a pipeline share the blocks, so that the mean of their times is no less than this by their number; the slowest
    one takes no less than the mean, and the step no less than the slowest. Operators of data parallelism, contention with
    them, the update, and waits of a pipeline only add to it.

    Args:
        one_expert: whether to count experts as one product at full speed.
    """
    return _seconds(costs.passes(batch, copies=False, one_expert=one_expert), blocks)


def least_step(costs: KindCosts, held: Sequence[tuple[int, Counter[int]]], job: Arrangement, share: float) -> float:
    """Return a lower bound of the step of ``job``: what its slowest rank computes, and what its pipeline says that it waits.

    Args:
        share: of a block of ``costs`` that a rank of the job has.
    """
    idle = 0.0 if job.pipeline is None else job.pipeline.idle
    return max(least_seconds(costs, blocks, job.batch) for _, blocks in held) * share * job.microbatches * (1.0 + idle)


def least_gib(
    costs: KindCosts, held: Sequence[tuple[int, Counter[int]]], job: Arrangement, share: float, world_size: int
) -> float:  # fmt: skip
    """Return a lower bound of the memory of ``job``, in GiB: all ranks' mean share of the state, and the activations that a
    rank keeps of the microbatches in flight, before it runs backward for the first of them.

    Args:
        share: of a block of ``costs`` that a rank of the job has.
    """
    kept = costs.kept(job.batch)
    alive = (1.0,) if job.pipeline is None else job.pipeline.alive
    most = max(sum(kept.get(one, 0.0) * count for one, count in blocks.items()) * alive[rank] for rank, blocks in held)
    return (costs.outside + costs.state_of_model() / world_size + most * share) / GIB


def filled(costs: KindCosts, blocks: Mapping[int, int], world_size: int, memory_gib: float, proved: bool = True) -> float:
    """Return the activations of a sequence on all blocks that a rank of a kind keeps for backward, by the memory that it has
    for them: what the device, and the rank's share of parameters and optimizer state, leave at most. Infinity if they leave
    nothing.

    Args:
        blocks: of the whole model.
        proved: whether to count no more than that. If not, whatever else is in use beside state, and what the allocator
            reserves beyond it.
    """
    free = memory_gib * GIB - costs.outside - costs.state_of_model() / world_size
    if free <= 0:
        return math.inf
    if proved:
        return sum(costs.kept(1).get(one, 0.0) * count for one, count in blocks.items()) / free
    return (max(size for _, size in costs.beside(1, tuple(blocks.items()))) + costs.idle(1)) / free


def compose(
    costs: KindCosts, held: Sequence[tuple[int, Counter[int]]], job: Arrangement, shares: RankShares = RankShares(),
    worth: Worth = ANY,
) -> Composition:  # fmt: skip
    """Return the memory and the time of the worst rank. With ``shares`` that are not 1, this is a guess, as if what ranks
    divide took no more time for that."""
    memory = max((_memory(costs, rank, blocks, job, shares) for rank, blocks in held), key=lambda one: sum(one.values()))
    passes = costs.passes(job.batch)
    _, slowest, busy = max(((rank, blocks, _seconds(passes, blocks)) for rank, blocks in held), key=lambda one: one[2])
    alone = busy * job.microbatches
    added = 0.0
    if alone * shares.work < worth.seconds and sum(memory.values()) <= worth.gib * GIB:
        added = max(0.0, _with_data_parallelism(costs, slowest, job) - alone)
    busy *= shares.work
    waits = {group: each * shares.work * job.microbatches for group, each in passes.exposed.items() if each}
    seconds = {
        "compute": busy * job.microbatches,
        DATA_PARALLEL: added * shares.weights,
        "update": passes.once * costs.state_share(slowest, job.data.scale) * shares.weights,
        "idle": 0.0 if job.pipeline is None else busy * job.microbatches * job.pipeline.idle,
    }
    shown = min(sum(waits.values()), seconds["compute"])
    total = sum(waits.values()) or 1.0
    seconds |= {group: each / total * shown for group, each in waits.items()}
    seconds["compute"] -= shown
    return Composition(memory, seconds)


def _with_data_parallelism(costs: KindCosts, blocks: Mapping[int, int], job: Arrangement) -> float:
    """Return the seconds of all microbatches of a step with what data parallelism adds to them."""

    def seconds(*transfers: str) -> float:
        return _seconds(costs.passes(job.batch, job.data, frozenset(transfers)), blocks)

    gathers = ("forward",) if job.parameters_stay else ("forward", "backward")
    each = seconds(*gathers, REDUCTIONS)
    if not job.gradients_stay:
        return each * job.microbatches
    return each + (job.microbatches - 1) * (seconds() if job.parameters_stay else seconds(*gathers))


def _seconds(passes: Passes, blocks: Mapping[int, int]) -> float:
    return sum((passes.forward.get(one, 0.0) + passes.backward.get(one, 0.0)) * count for one, count in blocks.items())


def _memory(
    costs: KindCosts, rank: int, blocks: Mapping[int, int], job: Arrangement, shares: RankShares
) -> dict[str, float]:  # fmt: skip
    of_state = costs.state_share(blocks, job.data.scale) * shares.weights
    number = job.microbatches if job.pipeline is None else job.pipeline.microbatches
    gradients = max((one.gradients for one in costs.moments(job.batch)), default=0.0)

    def state(moment: Moment) -> float:  # after the first microbatch, there are gradients in each forward pass
        return (moment.state + (gradients - moment.gradients if number > 1 else 0.0)) * of_state

    peak, size = max(costs.beside(job.batch, tuple(blocks.items())), key=lambda one: state(one[0]) + shares.work * one[1])
    found = {STATE: state(peak), "activations": max(0.0, shares.work * size)}
    if job.pipeline is not None:
        kept = costs.kept(job.batch)
        of_microbatch = shares.work * sum(kept.get(one, 0.0) * count for one, count in blocks.items())
        found["activations"] += max(0.0, job.pipeline.alive[rank] - 1) * of_microbatch
    whole = sum(costs.unsharded().get(one, 0.0) * count for one, count in blocks.items())
    found["gathered"] = whole * (job.gradients_stay + job.width * job.parameters_stay) * shares.weights
    return {**found, "allocator": costs.idle(job.batch) * shares.work, "context": costs.outside}


class Composes(Protocol):
    """Traces kinds and composes candidates of them (:class:`titan_simulate.plan.composer.Composer`)."""

    def trace(self, kinds: Mapping[Kind, MeshPlan], meanwhile: Callable[[], None]) -> None:
        """Trace kinds, each of which a job on its mesh has.

        Args:
            meanwhile: called while other processes trace.
        """
        ...

    def failure(self, kind: Kind) -> UserError | str | None:
        """Return why a kind that was traced has no costs, if so."""
        ...

    def seconds(self, kind: Kind, batch: int, one_expert: bool = False) -> float:
        """Return the least time of forward and backward of a sequence, in microbatches of ``batch`` ones, on all blocks of a
        kind that was traced.

        Args:
            one_expert: whether to count experts as one product at full speed.
        """
        ...

    def filled(self, kind: Kind, proved: bool = True) -> float:
        """Return the activations of a sequence that a rank of a traced kind keeps, by the memory that it has for them.

        Args:
            proved: whether to count what it keeps for backward only.
        """
        ...

    def least(self, candidate: Candidate, kind: Kind) -> tuple[float, float]:
        """Return lower bounds of the step of a candidate, in seconds, and of its memory, in GiB.

        Args:
            kind: that was traced, and from which the candidate's descends.
        """
        ...

    def composition(self, candidate: Candidate, kind: Kind | None = None, worth: Worth = ANY) -> Composition:
        """Return the memory and the time of a candidate.

        Args:
            worth: of which jobs the whole time is worth finding.
            kind: that was traced; default: its own. From another one, its own descends, and what is returned is a guess.
        """
        ...
