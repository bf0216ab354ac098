"""The step of a pipeline.

:func:`watch_schedule` notes what of torch's schedule runs while a rank is simulated. Its order for the microbatches of the
whole job (:class:`Order`) then runs on all ranks (:func:`run`) with the time of each stage (:func:`stage_times`), which is
that of the stages that were simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from titan_core.api import PipelineCosts
from titan_simulate.estimate.work import ACTIONS, ALL, BLOCKS, Action


@dataclass(frozen=True)
class Order:
    """What each rank of a pipeline does."""

    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    stages: tuple[int, ...]
    """Rank of each stage."""


class Schedule:
    """The schedule that a simulated rank ran, if any."""

    def __init__(self, mark: Callable[[Action], None]) -> None:
        """
        Args:
            mark: receives each action when it begins and when it ends.
        """
        self._mark = mark
        self._ran: Any = None
        self._stages: dict[int, Any] = {}
        self._microbatches: set[int] = set()
        self.action: Action | None = None
        """The action that runs, or ran last in this step."""

    @contextmanager
    def running(self, schedule: Any) -> Iterator[None]:
        """Within the ``with`` block, ``schedule`` runs a step."""
        self._ran, self.action = schedule, None
        self._stages, self._microbatches = {}, set()
        try:
            yield
        finally:
            self.action = None

    @contextmanager
    def acting(self, kind: str, stage: Any, microbatch: int) -> Iterator[None]:
        """Within the ``with`` block, ``stage``, one of torch's, runs an action."""
        self.action = kind, stage.stage_index, microbatch
        self._stages[stage.stage_index] = stage
        self._microbatches.add(microbatch)
        self._mark(self.action)
        yield
        self._mark(self.action)

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step; ``None`` without a pipeline."""
        return None if self._ran is None else len(self._microbatches)

    def of_job(self, pipeline: PipelineCosts, rank: int) -> tuple[Order | None, int]:
        """Return the order of the schedule of a job with ``pipeline``, ``None`` if no schedule ran; and how many more sent
        tensors than the one that ran it keeps on ``rank``, if that had as many ranks."""
        from titan_simulate.torch_private import ORDER_COMMUNICATION

        if self._ran is None:
            return None, 0
        ranks, microbatches, stages = max(pipeline.rank_of) + 1, pipeline.microbatches, pipeline.rank_of
        kept = 0
        name = type(self._ran).__name__
        if name == "ScheduleGPipe":
            actions = [gpipe(one, microbatches) for one in range(ranks)]
        elif name == "Schedule1F1B":
            actions = [one_forward_one_backward(one, ranks, microbatches) for one in range(ranks)]
        else:
            whole = self._ran
            if ranks != next(iter(self._stages.values())).group_size:
                with ExitStack() as stack:
                    _replace(type(whole), ORDER_COMMUNICATION, lambda method: lambda *args, **keywords: None, stack)
                    whole = type(whole)(_stages_of(pipeline, rank), microbatches, loss_fn=lambda *args: None)
            elif microbatches != self.microbatches:
                own = [self._stages[number] for number in sorted(self._stages)]
                whole = type(whole)(own, microbatches, loss_fn=lambda *args: None)
                kept = _most_pending_sends(whole) - _most_pending_sends(self._ran)
            actions = _actions_of(whole)
        return Order(tuple(map(tuple, actions)), stages), kept


def _stages_of(pipeline: PipelineCosts, rank: int) -> list[Any]:
    """Return what torch's schedules read of the stages of ``rank`` to order their actions."""
    from torch import nn

    last = len(pipeline.stages) - 1
    return [
        SimpleNamespace(
            stage_index=number, num_stages=last + 1, is_first=number == 0, is_last=number == last,
            group_size=max(pipeline.rank_of) + 1, group_rank=rank, submod=nn.Identity(),
        )
        for number, holder in enumerate(pipeline.rank_of)
        if holder == rank
    ]  # fmt: skip


@contextmanager
def watch_schedule(mark: Callable[[Action], None] = lambda action: None) -> Iterator[Schedule]:
    """Note the schedule that runs within the ``with`` block, and its actions.

    Args:
        mark: receives each action when it begins and when it ends.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    noted = Schedule(mark)

    def noting_schedule(step: Any) -> Any:
        def run(self: Any, *args: Any, **keywords: Any) -> Any:
            with noted.running(self):
                return step(self, *args, **keywords)

        return run

    def noting_action(kind: str, method: Any) -> Any:
        def run(self: Any, microbatch: int, *args: Any, **keywords: Any) -> Any:
            what = kind if keywords.get("full_backward", True) else "I"
            with noted.acting(what, self, microbatch):
                return method(self, microbatch, *args, **keywords)

        return run

    with ExitStack() as stack:
        for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
            _replace(schedule, "step", noting_schedule, stack)
        for name, kind in _ACTIONS.items():
            _replace(PipelineStage, name, partial(noting_action, kind), stack)
        yield noted


_ACTIONS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
"""Methods of torch's stages, and the actions that they run."""


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any], stack: ExitStack) -> None:
    """Replace a method, which may be inherited, until ``stack`` is closed."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, getattr(owner, name))
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, wrap(getattr(owner, name)))


def _actions_of(schedule: Any) -> list[list[Action]]:
    """Return what each rank does in a schedule with several stages per rank."""
    order = schedule.pipeline_order
    found = []
    for rank in sorted(order):
        whole = [action for action in order[rank] if action is not None]
        parts = [part for action in whole for part in getattr(action, "sub_actions", None) or (action,)]
        named = [(part.computation_type.value, part.stage_index, part.microbatch_index) for part in parts]
        found.append([action for action in named if action[0] in ("F", "B", "I", "W")])
    return found


def _most_pending_sends(schedule: Any) -> int:
    """Return how many tensors that this rank has sent a schedule with several stages per rank keeps at most: until a later
    action waits for them. 0 if the schedule does not say (before torch 2.15)."""
    pending = most = 0
    for action in getattr(schedule, "pipeline_order_with_comms", {}).get(schedule.rank, ()):
        name = action.computation_type.name
        pending += name in ("SEND_F", "SEND_B")
        pending -= name in ("WAIT_SEND_F", "WAIT_SEND_B")
        most = max(most, pending)
    return most


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


Stage = Mapping[str, Mapping[str, float]]
"""Seconds of an action, as in :attr:`~titan_simulate.estimate.figures.Figures.stages`."""


def stage_times(known: Mapping[int, Stage], weights: Sequence[float]) -> dict[str, list[float]]:
    """Return kind of action -> seconds by stage.

    Stages that are not simulated have neither an embedding nor a head, so they take the time of their blocks, at that of
    a block in simulated stages: those in the middle if there are any, which are like them.

    Args:
        known: simulated stages, by number.
        weights: of the blocks of each stage, in blocks of mean cost.
    """
    last = len(weights) - 1
    times: dict[str, list[float]] = {}
    for kind in ACTIONS:
        ran = [stage for stage in known if known[stage][ALL][kind]]
        # The first stage needs no gradients of its inputs: where they are computed by themselves, it is like no other.
        unlike = {"F": (), "B": ()}.get(kind, (0,))
        like = [one for one in ran if 0 < one < last] or [one for one in ran if one not in unlike] or ran
        total = sum(weights[stage] for stage in like)
        block = sum(known[stage][BLOCKS][kind] for stage in like) / total if total else 0.0
        times[kind] = [known[stage][ALL][kind] if stage in known else block * weights[stage] for stage in range(last + 1)]
    return times


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
