"""One simulation for an estimate, in a fork: a rank, some blocks, its trace and its memory."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.costs import costs_of
from titan_simulate.engine.observation import Observation, Operation
from titan_simulate.engine.result import SimulatedRank
from titan_simulate.engine.resumed import from_the_start
from titan_simulate.engine.simulate import SETTINGS, Train, simulate
from titan_simulate.engine.stub_libraries import Device
from titan_simulate.estimate.pipeline import Order, watch_schedule
from titan_simulate.estimate.reduce import Parts, keep_blocks
from titan_simulate.estimate.trace import Trace
from titan_simulate.estimate.work import Action, Kind, Work

JobOf = Callable[[Sequence[Override]], AssembledJob]
"""More overrides -> the job. Files that this machine lacks must be tolerated."""
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
    settings: dict[str, str], change: Change, microbatches: int | None, checks_model: bool,
) -> TracedRank:  # fmt: skip
    """Simulate ``rank`` with at most ``most`` blocks in each of its parts.

    Args:
        settings: overrides that reduce the job.
        microbatches: of the whole job's pipeline, for :attr:`TracedRank.order`.
        checks_model: whether to check the model on a small copy, which one of the simulations of a job should do.
    """
    logging.disable(logging.WARNING)  # what plugins notice about a run, such as an impossible MFU, is not true of this one
    with tempfile.TemporaryDirectory(prefix="titan-estimate-") as folder:
        values = {**SETTINGS, "training.stop_at_step": "1", "job.dump_folder": folder, **settings}
        job = job_of([Override(key, value) for key, value in values.items()])
        costs = list(costs_of(job.transforms, job))
        fused, fused_loss = any(one.fused for one in costs), any(one.fused_loss for one in costs)
        parts = Parts([], [], [])
        job = change(keep_blocks(job, most, parts))
        layout = job.model.layout

        def is_compiled(module: str) -> bool:
            return (fused and module.startswith(f"{layout.blocks}.")) or (fused_loss and module == layout.head[-1])

        def window(module: str) -> int | None:
            mixer = layout.mixer(module)
            return None if mixer is None else mixer.window

        with watch_schedule() as schedule:
            trace = _TraceOfMoments(is_compiled, lambda: schedule.action, window, parts)
            found = simulate(
                job, train, rank, observers=[trace], strict=False, device=device, resumed=True, checks_model=checks_model
            )
        found = replace(found, allocations=from_the_start(found.allocations))
        order, kept = (None, 0) if microbatches is None else schedule.of_job(microbatches)
        simulated = schedule.microbatches or job.batch.microbatches
        work = trace.work
        if any(one.graphed for one in costs):
            work = [replace(one, graphed=one.phase in ("forward", "backward")) for one in work]
        return TracedRank(rank, work, found, parts, simulated, order, kept)


class _TraceOfMoments(Trace):
    """Also divides the phases of a step by what computes: the first and the last block of a part, the blocks between, and
    whatever else. In each of these moments the memory in use is linear in the number of blocks, so its peaks extend."""

    def __init__(
        self,
        compiled: Callable[[str], bool],
        action: Callable[[], Action | None],
        window: Callable[[str], int | None],
        parts: Parts,
    ) -> None:
        super().__init__(compiled, action, window)
        self._parts = parts
        self._observation: Observation | None = None
        self._moments: dict[tuple[str, str], str] = {}

    def attach(self, observation: Observation) -> None:
        """See :class:`~titan_simulate.engine.observation.OperationObserver`."""
        self._observation = observation

    def __call__(self, operation: Operation) -> None:
        """See :class:`~titan_simulate.engine.observation.OperationObserver`."""
        super().__call__(operation)
        assert self._observation is not None
        if operation.phase in ("forward", "backward"):
            self._observation.memory.enter(self._moment(operation.phase, operation.module))

    def _moment(self, phase: str, module: str) -> str:
        found = self._moments.get((phase, module))
        if found is None:
            unit = ".".join(module.split(".")[:2])
            found = module.split(".")[0] or "-"
            for number, kept in enumerate(self._parts.kept):
                if unit in kept:
                    place = kept.index(unit)
                    which = "first" if place == 0 else "last" if place == len(kept) - 1 else "middle"
                    found = f"{which} block of part {number}"
            found = self._moments[phase, module] = f"{phase} {found}"
        return found
