"""One simulation for an estimate, in a fork: a rank, some blocks, its trace and its memory."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from titan_core.api import PipelineCosts
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.costs import costs_of
from titan_simulate.engine.observation import Observation, Operation
from titan_simulate.engine.result import Label, PhaseFigures, SimulatedRank, peak_of
from titan_simulate.engine.resumed import from_the_start
from titan_simulate.engine.simulate import SETTINGS, Train, simulate
from titan_simulate.engine.stub_libraries import Device
from titan_simulate.estimate.block_classes import unit_of
from titan_simulate.estimate.pipeline import Order, watch_schedule
from titan_simulate.estimate.reduce import Parts, keep_blocks
from titan_simulate.estimate.short_pipeline import blocks_of_rank, enough_microbatches, first_blocks, names_blocks, shortened
from titan_simulate.estimate.trace import Trace
from titan_simulate.estimate.unroll_actions import peaks_by_moment, unroll_actions
from titan_simulate.estimate.work import Action, Kind, Work

JobOf = Callable[[Sequence[Override]], AssembledJob]
"""More overrides -> the job. Files that this machine lacks must be tolerated."""
FEW = 2
"""Blocks per part of the smaller simulation, if all are alike: the first and the last one."""
Change = Callable[[AssembledJob], AssembledJob]
"""Changes a job before it is simulated."""


@dataclass(frozen=True)
class TracedRank:
    """A simulated rank."""

    rank: int
    trace: list[Work]
    """A step that starts with the optimizer's state."""
    found: SimulatedRank
    parts: Parts
    microbatches: int
    """Forward passes of each part in a step."""
    order: Order | None
    """The order of the pipeline of the whole job; ``None`` without one."""
    peaks: Mapping[str, Mapping[Label, int]] = field(default_factory=dict)
    """What is in use at the peak of each moment, by owner and module."""
    kept_sends: int = 0
    """How many tensors that it has sent the pipeline of the whole job keeps, in addition to those of the simulated one."""

    @property
    def send_bytes(self) -> int:
        """Size of what a stage sends to another."""
        sent = (work.bytes for work in self.trace if work.kind is Kind.SEND and work.action is not None)
        return max(sent, default=0)

    @property
    def blocks(self) -> int:
        """Number of simulated blocks."""
        return sum(map(len, self.parts.kept))


def take(
    job_of: JobOf, train: Train, rank: int, most: int | None, device: Device,
    settings: dict[str, str], change: Change, pipeline: PipelineCosts | None, short: int, checks_model: bool, repeating: int,
) -> TracedRank:  # fmt: skip
    """Simulate ``rank`` with at most ``most`` blocks in each of its parts.

    Args:
        rank: the first or the last one.
        settings: overrides that reduce the job.
        pipeline: of the whole job.
        short: fewest blocks of a stage of the short pipeline that stands for it, if one does
            (:mod:`titan_simulate.estimate.short_pipeline`), or 0.
        checks_model: whether to check the model on a small copy, which one of the simulations of a job should do.
        repeating: how many of ``most`` blocks, those before the last one, stand for others.
    """
    torch.set_num_threads(1)  # forks run beside each other, and what they compute on the CPU is small
    logging.disable(logging.WARNING)  # what plugins notice about a run, such as an impossible MFU, is not true of this one
    with tempfile.TemporaryDirectory(prefix="titan-estimate-") as folder:
        values = {**SETTINGS, "training.stop_at_step": "1", "job.dump_folder": folder, **settings}
        job = job_of([Override(key, value) for key, value in values.items()])
        along = 0 if pipeline is None or rank == 0 else max(pipeline.rank_of)
        parts = Parts([], [], [])
        simulated = rank
        if short and pipeline is not None:
            parts.whole = blocks_of_rank(pipeline, job, along)
            checked = shortened(job, pipeline, short, whole_model=True) if checks_model else None
            checks_model = checked is not None  # a model with fewer blocks has other operations than its definition says
            job = checked or shortened(job, pipeline, short) or job
            simulated = 0 if rank == 0 else job.mesh.world_size - 1
        elif pipeline is None and most is not None and not checks_model and not names_blocks(job):
            parts.whole = [job.model.layout.num_blocks]
            job = replace(job, model=first_blocks(job.model, min(most, *parts.whole)))
        costs = list(costs_of(job.transforms, job))
        fused, fused_loss = any(one.fused for one in costs), any(one.fused_loss for one in costs)
        job = change(keep_blocks(job, most, parts, repeating))
        layout = job.model.layout

        def is_compiled(module: str) -> bool:
            return (fused and module.startswith(f"{layout.blocks}.")) or (fused_loss and module == layout.head[-1])

        def window(module: str) -> int | None:
            mixer = layout.mixer(module)
            return None if mixer is None else mixer.window

        trace = _TraceOfMoments(is_compiled, lambda: schedule.action, window, layout.blocks, parts)
        with watch_schedule(trace.mark) as schedule:
            found = simulate(
                job, train, simulated, [trace], strict=False, device=device, resumed=True, checks_model=checks_model
            )  # fmt: skip
        order, kept = (None, 0) if pipeline is None else schedule.of_job(pipeline, along)
        if short and pipeline is not None:
            enough, _ = schedule.of_job(replace(pipeline, microbatches=enough_microbatches(pipeline)), along)
            assert enough is not None
            found, kept = _with_actions(found, enough.actions[along]), 0
        peaks = peaks_by_moment(found.allocations) if pipeline is None else {}
        found = replace(found, allocations=from_the_start(found.allocations))
        work = trace.work
        if any(one.graphed for one in costs):
            work = [replace(one, graphed=one.phase in ("forward", "backward")) for one in work]
        microbatches = schedule.microbatches or job.batch.microbatches
        return TracedRank(rank, work, found, parts, microbatches, order, peaks, kept)


def _with_actions(found: SimulatedRank, actions: Sequence[Action]) -> SimulatedRank:
    """Return the memory of a rank that runs ``actions`` in place of those of the short pipeline that was simulated."""
    allocations = unroll_actions(found.allocations, actions)
    peaks = peaks_by_moment(allocations)

    def of_moment(phase: PhaseFigures) -> PhaseFigures:
        if not phase.name.startswith(("forward", "backward")) or phase.name not in peaks:
            return phase
        return replace(phase, peak=peak_of(peaks[phase.name], phase.peak.operator, phase.peak.module))

    *steps, last = found.steps
    last = replace(last, phases=tuple(map(of_moment, last.phases)))
    return replace(found, steps=(*steps, last), allocations=allocations)


class _TraceOfMoments(Trace):
    """Also divides the phases of a step by what computes: the first and the last block of a part, the blocks between, and
    whatever else. In each of these moments the memory in use is linear in the number of blocks, so its peaks extend."""

    def __init__(
        self,
        compiled: Callable[[str], bool],
        action: Callable[[], Action | None],
        window: Callable[[str], int | None],
        blocks: str,
        parts: Parts,
    ) -> None:
        super().__init__(compiled, action, window, blocks)
        self._parts = parts
        self._observation: Observation | None = None
        self._moments: dict[tuple[str, str], str] = {}

    def attach(self, observation: Observation) -> None:
        """See :class:`~titan_simulate.engine.observation.OperationObserver`."""
        self._observation = observation

    def mark(self, action: Action) -> None:
        """Mark the beginning or the end of an action of the pipeline in the trace of allocations."""
        assert self._observation is not None
        self._observation.memory.mark(action)

    def __call__(self, operation: Operation) -> None:
        """See :class:`~titan_simulate.engine.observation.OperationObserver`."""
        super().__call__(operation)
        assert self._observation is not None
        if operation.phase in ("forward", "backward"):
            self._observation.memory.enter(self._moment(operation.phase, operation.module))

    def _moment(self, phase: str, module: str) -> str:
        found = self._moments.get((phase, module))
        if found is None:
            unit = unit_of(module, self._blocks)
            found = unit or "-"
            for number, kept in enumerate(self._parts.kept):
                if unit in kept:
                    after = len(kept) - 1 - kept.index(unit)
                    repeats = after <= self._parts.repeating[number]
                    which = "first" if after == len(kept) - 1 or not repeats else "middle" if after else "last"
                    found = f"{which} block of part {number}"
            found = self._moments[phase, module] = f"{phase} {found}"
        return found
