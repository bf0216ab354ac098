"""The step of a pipeline: the order of actions of torch's schedule on every rank, simulated with the time of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Action = tuple[str, int, int]
"""What (``F``, ``B``: whole backward, ``I``: gradients of inputs, ``W``: of weights), stage, microbatch."""


@dataclass(frozen=True)
class Order:
    """What each rank of a pipeline does."""

    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    stages: tuple[int, ...]
    """Rank of each stage."""


class Schedule:
    """The schedule that a simulated rank ran, if any."""

    def __init__(self) -> None:
        self._ran: Any = None

    def note(self, schedule: Any) -> None:
        """Remember ``schedule``."""
        self._ran = schedule

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step; ``None`` without a pipeline."""
        from titan_simulate.torch_private import microbatches_of_schedule

        return None if self._ran is None else microbatches_of_schedule(self._ran)

    def order(self, microbatches: int) -> Order | None:
        """Return the order of the schedule with ``microbatches``; ``None`` without a pipeline."""
        from titan_simulate.torch_private import order_of_schedule, ranks_and_stages

        if self._ran is None:
            return None
        ranks, stages = ranks_and_stages(self._ran)
        name = type(self._ran).__name__
        if name == "ScheduleGPipe":
            actions = [gpipe(rank, microbatches) for rank in range(ranks)]
        elif name == "Schedule1F1B":
            actions = [one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)]
        else:
            actions = order_of_schedule(self._ran, microbatches)
        return Order(tuple(map(tuple, actions)), stages)


@contextmanager
def watch_schedule() -> Iterator[Schedule]:
    """Note the schedule that runs within the ``with`` block."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    noted = Schedule()
    kinds: list[Any] = [PipelineScheduleSingle, PipelineScheduleMulti]
    steps = [kind.step for kind in kinds]

    def noting(step: Any) -> Any:
        def run(self: Any, *args: Any, **keywords: Any) -> Any:
            noted.note(self)
            return step(self, *args, **keywords)

        return run

    for kind, step in zip(kinds, steps, strict=True):
        kind.step = noting(step)
    try:
        yield noted
    finally:
        for kind, step in zip(kinds, steps, strict=True):
            kind.step = step


def gpipe(rank: int, microbatches: int) -> list[Action]:
    """Return the actions of a rank in GPipe: all forward, then all backward."""
    numbers = range(microbatches)
    return [*(("F", rank, number) for number in numbers), *(("B", rank, number) for number in numbers)]


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the actions of a rank in 1F1B: as many forwards as stages follow, then one of each in turn."""
    warmup = min(microbatches, ranks - rank)
    actions: list[Action] = [("F", rank, number) for number in range(warmup)]
    following = warmup
    for number in range(microbatches):
        actions.append(("B", rank, number))
        if following < microbatches:
            actions.append(("F", rank, following))
            following += 1
    return actions


@dataclass(frozen=True)
class PipelineTime:
    """A run of the schedule."""

    seconds: float
    bubble: float
    """Share of the time in which the busiest rank has nothing to do."""


def run(order: Order, times: Mapping[str, Sequence[float]], send: float) -> PipelineTime:
    """Simulate a run of a schedule.

    Args:
        times: kind of action -> seconds by stage.
        send: seconds to send a microbatch's hidden states, or their gradient, to another rank.
    """
    last = len(order.stages) - 1
    done: dict[Action, float] = {}
    now = [0.0] * len(order.actions)
    position = [0] * len(order.actions)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(order.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = _ready(action, order, done, last, send)
                if ready is None:
                    break
                now[rank] = max(now[rank], ready) + times[action[0]][action[1]]
                done[action] = now[rank]
                if action[0] == "B":
                    done["I", action[1], action[2]] = now[rank]
                position[rank] += 1
                progress = True
    if any(place < len(actions) for place, actions in zip(position, order.actions, strict=True)):
        raise RuntimeError("the schedule's order of actions cannot be run: each rank waits for another")
    seconds = max(now)
    busiest = max(sum(times[kind][stage] for kind, stage, _ in actions) for actions in order.actions)
    return PipelineTime(seconds, 1.0 - busiest / seconds if seconds else 0.0)


def _ready(action: Action, order: Order, done: Mapping[Action, float], last: int, send: float) -> float | None:
    """Return when the inputs of an action are there; ``None`` if that is not known yet."""
    kind, stage, number = action
    if kind == "F":
        needed: Action | None = ("F", stage - 1, number) if stage else None
        other = stage - 1
    elif kind == "W":
        needed, other = ("I", stage, number), stage
    else:
        needed, other = (("I", stage + 1, number), stage + 1) if stage < last else (("F", stage, number), stage)
    if needed is None:
        return 0.0
    when = done.get(needed)
    if when is None:
        return None
    return when + (send if order.stages[other] != order.stages[stage] else 0.0)
