"""A simulated run whose optimizer has its state before the first step, as one that resumes, so that one step shows what
every later one does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from titan_core.api import Checkpoint, CheckpointContext, CheckpointStore, Ref
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.engine.allocator import Event
from titan_simulate.engine.result import AllocationTrace


@dataclass(frozen=True)
class _State:
    """A checkpoint store that saves nothing and restores only the existence of the optimizer's state."""

    optimizer: Optimizer
    newest: tuple[int, str] | None = None

    def restore(self) -> bool:
        """Make the state as the first step would. Tensors have no values, so no weight changes."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return False

    def after_step(self, last: bool, requested: bool) -> None:
        """Do nothing."""

    def before_update(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_state(context: CheckpointContext[Any]) -> CheckpointStore:
    """Return the store."""
    return _State(context.state.optimizer)


def with_optimizer_state(job: AssembledJob) -> AssembledJob:
    """Return ``job`` with the state of its optimizer from the start."""
    checkpoint = Checkpoint(
        name="optimizer_state",
        summary="the optimizer's state before the first step",
        build=Ref("titan_simulate.engine.resumed:open_state"),
        active=lambda context: True,
    )
    return replace(job, checkpoint=checkpoint)


def from_the_start(trace: AllocationTrace) -> AllocationTrace:
    """Return the allocations of the first two steps of a run that starts anew, from those of a resumed run's first step. Its
    first update makes the optimizer's state, in memory that the passes before it have left."""
    first = next(number for number, (_, name) in enumerate(trace.moments) if name == "forward")
    begin = trace.moments[first][0]
    made = next(position for position, name in trace.moments[:first] if name == "optimizer")
    freed = {number for number, size, _ in trace.events[made:begin] if not size}  # gradients that only make the state
    before = [event for event in trace.events[:made] if event[0] not in freed]
    state = [event for event in trace.events[made:begin] if event[1] and event[0] not in freed]
    step, moments = trace.events[begin:], [(position - begin, name) for position, name in trace.moments[first:]]
    update = next(number for number, (_, name) in enumerate(moments) if name == "optimizer")
    updated = moments[update][0]
    events = [*before, *step[:updated], *state, *step[updated:]]
    late = [(position + len(state) * (number > update), name) for number, (position, name) in enumerate(moments)]
    found = [(0, "start"), *((position + len(before), name) for position, name in late)]
    found += [(position + len(events), name) for position, name in moments]
    again, left = _again(step)
    return AllocationTrace((*events, *again, *left), tuple(found))


def _again(step: tuple[Event, ...]) -> tuple[list[Event], list[Event]]:
    """Return the events of a step that follows ``step`` and is like it, and those that free what the first one has left."""
    own = {number for number, size, _ in step if size}
    offset = 1 + max(own, default=0)
    again = [(number + offset, size, stream) for number, size, stream in step if number in own]
    left = own - {number for number, size, _ in step if not size}
    return again, [(number, 0, 0) for number in sorted(left)]
