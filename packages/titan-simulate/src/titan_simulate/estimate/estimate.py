"""Memory and time of a step of a job on a machine."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from titan_core.api import PipelineCosts, UserError
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.costs import ADAMW, costs_of, costs_of_optimizer
from titan_simulate.engine import forks
from titan_simulate.engine.result import Owner, Peak
from titan_simulate.engine.simulate import Train
from titan_simulate.engine.stub_libraries import Device
from titan_simulate.estimate.after_update import seconds_after_update
from titan_simulate.estimate.assumptions import assumptions_of
from titan_simulate.estimate.block_classes import block_classes, repetition
from titan_simulate.estimate.figures import ONCE, REPEATED, figures_of
from titan_simulate.estimate.imbalance import busiest
from titan_simulate.estimate.job_memory import FP32, frozen_parameters
from titan_simulate.estimate.pipeline import Order, PipelineTime, Stage, run, stage_times
from titan_simulate.estimate.reserved import memory_need
from titan_simulate.estimate.roofline import send_seconds
from titan_simulate.estimate.short_pipeline import enough_microbatches, microbatches_of, shortened
from titan_simulate.estimate.traced_rank import FEW, Change, JobOf, TracedRank, take
from titan_simulate.estimate.work import Work
from titan_simulate.hardware.machine import Machine

GIB = 2**30

OWN_SHARDS = {"data.logical_shards": "0"}
"""The job's own number need not divide a smaller batch."""

_KINDS = {
    Owner.PARAMETERS: "parameters", Owner.BUFFERS: "parameters", Owner.GRADIENTS: "gradients",
    Owner.OPTIMIZER: "optimizer_state", Owner.ACTIVATIONS: "activations", Owner.LOSS: "logits_and_loss",
    Owner.COMMUNICATION: "communication", Owner.GATHERED: "communication", Owner.OTHER: "other",
}  # fmt: skip
OVERHEAD = "allocator_and_context"
T = TypeVar("T")
Worst = Callable[[Sequence[Work]], list[Work]]
"""The trace of a rank -> that of the rank of its stage that the others wait for."""


@dataclass(frozen=True)
class CollectiveEstimate:
    """Calls of one collective on one group in one step."""

    operator: str
    group: str
    ranks: int
    count: float
    bytes: float
    """Sum over the calls of the larger of input and output."""
    seconds: float
    exposed_seconds: float
    """Of these, seconds in which nothing computes."""


@dataclass(frozen=True)
class Estimate:
    """What a step of a job needs. Plain values."""

    device: str
    mesh: str
    world_size: int
    rank: int
    """The rank that needs most memory, among those that were simulated."""
    peak_gib: float
    """Largest memory of a device: what torch's allocator has reserved, and the memory of CUDA and NCCL."""
    allocated_gib: float
    """Largest memory in use at a time, with the workspaces of cuBLAS: ``torch.cuda.max_memory_allocated``."""
    reserved_gib: float
    """Largest memory that torch's allocator has reserved: ``torch.cuda.max_memory_reserved``. No less than
    ``allocated_gib``."""
    retries: int
    """How often in two steps the device is full, so that the allocator waits and returns free memory to it."""
    memory: Mapping[str, float]
    """GiB at the peak, by kind."""
    fits: bool
    moment: str
    """When the peak occurs: phase and place."""
    at_peak: Mapping[str, float]
    """GiB by the module that allocated it, blocks together; largest first."""
    host_gib: float
    """Memory of the host that a rank's offloaded parameters, optimizer state, averages and activations take."""
    step_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float
    """Share of the machine's bf16 peak that the model's own operations (without recomputation) reach."""
    seconds: Mapping[str, float]
    """Device time of a rank by kind of work, overlapping or not, and ``host``: the time that the host needs to issue it."""
    collectives: tuple[CollectiveEstimate, ...]
    bubble: float
    """Share of the pipeline's time in which its busiest rank waits."""
    assumptions: Mapping[str, Any]
    """All figures of the machine that were used, and how the job was reduced."""


def estimate(
    job_of: JobOf,
    train: Train,
    machine: Machine,
    simulated: Callable[[int, int], None] = lambda done, number: None,
    change: Change = lambda job: job,
    imbalance: float = 1.0,
    details: Callable[[Details], None] = lambda details: None,
) -> Estimate:
    """Estimate a step of a job.

    Simulates a few blocks of the first and of the last rank in forks of this process, in which the stub libraries must be
    loaded, and extends the figures linearly.

    Args:
        job_of: returns the job with further overrides.
        train: trains a job in this process.
        simulated: receives how many of how many simulations have ended, after each.
        change: applied to the job just before it is simulated; what costs the job has is known by then.
        imbalance: rows that the experts of the busiest rank compute, by the mean of the ranks that divide them.
        details: receives what the estimate is made of, to explain it.

    Raises:
        UserError: the job cannot run.
    """
    job = job_of(())
    if not job.trains:
        raise UserError.one("the job", "does not train", "estimate a job that trains")
    costs = list(costs_of(job.transforms, job))
    pipeline = next((one.pipeline for one in costs if one.pipeline is not None), None)
    size = job.mesh.world_size
    ranks = [0] if pipeline is None else [0, size - 1]
    first, every = repetition(list(block_classes(job.model.layout, frozen_parameters(job)).values()))
    of_optimizer = costs_of_optimizer(job.optimizer, job) or ADAMW
    alike = of_optimizer.blocks_alike and all(one.blocks_alike for one in costs) and (every == 1 or pipeline is None)
    # Whole periods are added to what is simulated.
    fewest = first + FEW + (job.model.layout.num_blocks - first - FEW) % every
    few, more = (fewest, fewest + every) if alike else (None, None)
    settings, scale, short = _reduction(job, pipeline, more)
    device = device_of(machine)

    # The longest ones first, and of these the one that checks the model too.
    samples = [(rank, most) for most in dict.fromkeys((more, few)) for rank in ranks]
    forks.load()
    taken = forks.call_in_forks(
        [
            partial(
                take, job_of, train, rank, most, device, settings, change, pipeline, short,
                checks_model=(rank, most) == samples[0], repeating=every if most == more else 0,
            )
            for rank, most in samples
        ],
        at_once=len(os.sched_getaffinity(0)),
        done=lambda done: simulated(done, len(samples)),
    )  # fmt: skip
    of_rank = {rank: [one for one in reversed(taken) if one.rank == rank] for rank in ranks}
    overlaps = any(one.overlaps_matmuls for one in costs)
    fixed = any(one.exchanged_rows is not None for one in costs)
    worst = partial(busiest, job=job, imbalance=imbalance, fixed=fixed)
    found = {rank: Extended(pair, machine, scale, overlaps, worst) for rank, pair in of_rank.items()}
    trained = 1 - sum(frozen_parameters(job).values()) / job.model.num_params
    after_update = max(
        seconds_after_update(costs, one.elements * trained, one.sections[REPEATED], machine) for one in found.values()
    )
    made_of = Details(found, _pipeline(job, pipeline, found, machine), after_update, machine)
    details(made_of)
    return _combined(job, made_of, few, more, imbalance)


def _reduction(
    job: AssembledJob, pipeline: PipelineCosts | None, more: int | None
) -> tuple[dict[str, str], float, int]:  # fmt: skip
    """Return settings that reduce the microbatches of a step, the factor by which to extend what each repeats, and the
    fewest blocks of a stage of the short pipeline that stands for that of the job, or 0.

    Args:
        more: how many blocks of a part stand for all of them, if that many do.
    """
    batch = job.batch
    if pipeline is None:
        if batch.microbatches <= 2:
            return {}, 1.0, 0
        fewer_sequences = 2 * batch.local_size * batch.ranks
        return {"training.global_batch_size": str(fewer_sequences), **OWN_SHARDS}, batch.microbatches / 2, 0
    if more is not None and shortened(job, pipeline, more) is not None:
        return {}, pipeline.microbatches / microbatches_of(pipeline), more
    fewer = enough_microbatches(pipeline)
    if fewer == pipeline.microbatches:
        return {}, 1.0, 0
    local = fewer * pipeline.microbatch_size
    settings = {"training.local_batch_size": str(local), "training.global_batch_size": str(local * batch.ranks)}
    return {**settings, **OWN_SHARDS}, pipeline.microbatches / fewer, 0


def device_of(machine: Machine) -> Device:
    """Return what a simulation runs on."""
    major, _, minor = machine.capability.partition(".")
    return Device(
        machine.name,
        machine.ranks_per_node,
        (int(major), int(minor)),
        machine.multiprocessors,
        int(machine.memory_gib * GIB),
    )


class Extended:
    """The figures of a rank, extended from its samples to all blocks."""

    def __init__(self, samples: Sequence[TracedRank], machine: Machine, scale: float, overlaps: bool, worst: Worst) -> None:
        self.samples = samples
        whole = sum(samples[0].parts.blocks)
        few, more = samples[0], samples[-1]
        spread = more.blocks - few.blocks
        self._share = (whole - few.blocks) / spread if spread else 0.0
        self._machine = machine
        figures = [figures_of(sample, machine, scale, overlaps, worst) for sample in samples]
        self.figures = figures[0], figures[-1]
        self.seconds = self.extend(figures[0].seconds, figures[-1].seconds)
        self.sections = self.extend(figures[0].sections, figures[-1].sections)
        self.kinds = self.extend(figures[0].kinds, figures[-1].kinds)
        self.collectives = {
            key: self.extend(figures[0].collectives.get(key, {}), value)
            for key, value in figures[-1].collectives.items()
        }  # fmt: skip
        self.stages = [
            {
                which: {kind: self.extend_part(one[which][kind], two[which][kind], number) for kind in two[which]}
                for which in two
            }
            for number, (one, two) in enumerate(zip(figures[0].stages, figures[-1].stages, strict=True))
        ]
        self.send_bytes = more.send_bytes
        self.rank = few.rank
        self.order: Order | None = more.order
        self.moment, self.bytes, self.sizes, self.modules = self._peak()
        if more.kept_sends:
            kept = self.sizes[Owner.COMMUNICATION, "sent to other stages"] = more.kept_sends * more.send_bytes
            self.bytes += kept
        self.need = memory_need(samples, machine, self.bytes, self._share)
        # On the device: none with ``training.enable_cpu_offload``.
        resident = ({"all": one.found.resident.get(Owner.PARAMETERS, 0)} for one in (few, more))
        self.elements = self.extend(*resident)["all"] / FP32
        self.on_host = self.extend({"host": few.found.on_host}, {"host": more.found.on_host})["host"]

    def extend(self, few: Any, more: Any) -> Any:
        """Extend a figure, or each of a mapping, of the samples with few and with more blocks."""
        if isinstance(more, Mapping):
            return {key: self.extend(few.get(key, 0.0), more.get(key, 0.0)) for key in {**few, **more}}
        return few + (more - few) * self._share

    def extend_part(self, few: float, more: float, number: int) -> float:
        """Extend a figure of one part by the blocks of that part."""
        one, two = self.samples[0].parts, self.samples[-1].parts
        spread = len(two.kept[number]) - len(one.kept[number])
        share = (one.blocks[number] - len(one.kept[number])) / spread if spread else 0.0
        return few + (more - few) * share

    def _peak(self) -> tuple[str, float, dict[tuple[Owner, str], float], dict[str, float]]:
        few, more = (
            {phase.name: phase.peak for phase in one.found.steps[-1].phases} for one in (self.samples[0], self.samples[-1])
        )
        name = max((one for one in more if one in few), key=lambda one: self.extend(few[one].bytes, more[one].bytes))
        sizes, modules = zip(*map(_blocks_together, (few[name], more[name])), strict=True)
        extended = self.extend(*modules)
        return (
            name,
            self.extend(few[name].bytes, more[name].bytes),
            self.extend(*sizes),
            dict(sorted(extended.items(), key=lambda item: -item[1])),
        )


def _blocks_together(peak: Peak) -> tuple[dict[tuple[Owner, str], float], dict[str, float]]:
    """Return the bytes of a peak by owner and the module to which they belong, and by the module that allocated them."""
    sizes: dict[tuple[Owner, str], float] = defaultdict(float)
    modules: dict[str, float] = defaultdict(float)
    for owner, belonging in peak.belonging.items():
        for module, size in belonging.items():
            sizes[owner, together(module)] += size
    for module, size in peak.modules.items():
        modules[together(module)] += size
    return sizes, modules


def together(module: str) -> str:
    """Return ``module`` with the number of its block replaced: ``layers.*.attention``."""
    return ".".join("*" if part.isdigit() else part for part in module.split(".")) or "-"


@dataclass(frozen=True)
class Details:
    """What an estimate is made of."""

    ranks: Mapping[int, Extended]
    """The simulated ranks."""
    pipeline: PipelineTime | None
    after_update: float
    """Seconds that a step takes for what transforms do after an update."""
    machine: Machine

    @property
    def largest(self) -> Extended:
        """The rank that needs most memory."""
        return max(self.ranks.values(), key=lambda one: one.need.bytes)


def _combined(job: AssembledJob, details: Details, few: int | None, more: int | None, imbalance: float) -> Estimate:
    found, pipeline, machine, worst = details.ranks, details.pipeline, details.machine, details.largest
    first = found[min(found)]
    step = first.seconds if pipeline is None else pipeline.seconds + max(one.sections[ONCE] for one in found.values())
    step += details.after_update
    batch, size = job.batch, job.mesh.world_size
    tokens = batch.tokens_per_step / step / size
    flops = job.flops_per_token
    memory = dict.fromkeys(_KINDS.values(), 0.0)
    for (owner, _), count in worst.sizes.items():
        memory[_KINDS[owner]] += count / GIB
    total = worst.need.bytes / GIB
    memory[OVERHEAD] = total - sum(memory.values())
    whole = sum(first.samples[0].parts.blocks)
    assumptions = {
        **machine.assumptions(),
        **assumptions_of(job, [one.samples[0] for one in found.values()], machine, imbalance),
        "simulated blocks": "all"
        if few is None or more is None or whole <= more
        else f"{few} and {more} per part, extended linearly",
    }
    return Estimate(
        device=machine.name,
        mesh=str(job.mesh),
        world_size=size,
        rank=worst.rank,
        peak_gib=total,
        allocated_gib=worst.need.allocated / GIB,
        reserved_gib=worst.need.reserved / GIB,
        retries=worst.need.retries,
        memory=dict(memory),
        fits=all(one.need.fits for one in found.values()),
        moment=worst.moment,
        at_peak={module: count / GIB for module, count in list(worst.modules.items())[:12]},
        host_gib=worst.on_host / GIB,
        step_seconds=step,
        tokens_per_second_per_gpu=tokens,
        mfu=flops * tokens / (machine.matmul_of("bf16").peak_tflops * 1e12),
        seconds={str(kind): value for kind, value in worst.kinds.items()},
        collectives=tuple(
            CollectiveEstimate(*key, value["count"], value["bytes"], value["seconds"], value["exposed"])
            for key, value in sorted(worst.collectives.items(), key=lambda item: -item[1]["seconds"])
        ),
        bubble=0.0 if pipeline is None else pipeline.bubble,
        assumptions=assumptions,
    )


def _pipeline(
    job: AssembledJob, costs: PipelineCosts | None, found: Mapping[int, Extended], machine: Machine
) -> PipelineTime | None:  # fmt: skip
    """Return the time of the pipeline's run; ``None`` without one."""
    first, last = found[min(found)], found[max(found)]
    order = first.order
    if order is None or costs is None:
        return None
    known: dict[int, Stage] = {}
    for one, rank in ((first, order.stages[0]), (last, max(order.stages))):
        numbers = [stage for stage, other in enumerate(order.stages) if other == rank]
        known |= dict(zip(numbers, one.stages, strict=True))
    apart = job.mesh.world_size // len(order.actions)
    send = send_seconds(first.send_bytes or last.send_bytes, machine, same_node=apart < machine.ranks_per_node)
    return run(order, stage_times(known, _weights(job, costs)), send)


def _weights(job: AssembledJob, costs: PipelineCosts) -> list[float]:
    """Return the sum of the costs of the blocks of each stage of a pipeline."""
    layout = job.model.layout
    each = layout.block_costs or (1.0,) * layout.num_blocks
    of_block = {f"{layout.blocks}.{number}": cost for number, cost in enumerate(each)}
    return [sum(of_block.get(name, 0.0) for name in names) for names in costs.stages]
