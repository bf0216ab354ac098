"""The memory of a pipeline with many microbatches, from that of one with few."""

from __future__ import annotations

from itertools import accumulate

import pytest

pytest.importorskip("titan_simulate")

from titan_simulate.engine.allocator import Event
from titan_simulate.engine.result import AllocationTrace, Label, Owner
from titan_simulate.estimate.pipeline import gpipe, one_forward_one_backward
from titan_simulate.estimate.unroll_actions import peaks_by_moment, unroll_actions
from titan_simulate.estimate.work import Action

WEIGHTS, GATHERED, KEPT, SENT, GRADIENTS, BESIDE = 1000, 300, 50, 7, 200, 20
"""Bytes of what a toy stage makes."""


def toy(actions: list[Action], blocks: int = 1) -> AllocationTrace:
    """Return the allocations of a rank: the first forward pass of a stage gathers its parameters, each keeps activations
    until the backward pass of its microbatch and sends a tensor that lives until the next action; the first backward pass
    makes gradients, which the optimizer frees."""
    events: list[Event] = []
    labels: list[Label] = []
    marks: list[tuple[int, Action]] = []

    def make(size: int, owner: Owner, module: str) -> int:
        labels.append((owner, module, module))
        events.append((len(labels), size, 0))
        return len(labels)

    def free(number: int) -> None:
        events.append((number, 0, 0))

    make(WEIGHTS * blocks, Owner.PARAMETERS, "")
    moments = [(0, "start"), (len(events), "forward")]
    kept: dict[tuple[int, int], list[int]] = {}
    gathered: dict[int, int] = {}
    gradients: dict[int, int] = {}
    sent: int | None = None
    for kind, stage, microbatch in actions:
        marks.append((len(events), (kind, stage, microbatch)))
        moments.append((len(events), f"{kind} of blocks"))
        if kind == "F":
            if stage not in gathered:
                gathered[stage] = make(GATHERED, Owner.GATHERED, "layers.0")
            kept[stage, microbatch] = [make(KEPT, Owner.ACTIVATIONS, f"layers.{block}") for block in range(blocks)]
        else:
            beside = make(BESIDE, Owner.ACTIVATIONS, "layers.0")
            for number in kept.pop((stage, microbatch)):
                free(number)
            moments.append((len(events), "B of gradients"))
            if stage not in gradients:
                gradients[stage] = make(GRADIENTS, Owner.GRADIENTS, "layers.0")
            free(beside)
        moments.append((len(events), f"after {kind}"))
        if sent is not None:
            free(sent)
        sent = make(SENT, Owner.COMMUNICATION, "")
        marks.append((len(events), (kind, stage, microbatch)))
    assert sent is not None
    free(sent)
    moments.append((len(events), "optimizer"))
    for number in (*gathered.values(), *gradients.values()):
        free(number)
    return AllocationTrace(tuple(events), tuple(moments), tuple(marks), tuple(labels))


def levels(trace: AllocationTrace) -> list[int]:
    """Return the bytes in use after each event; raises if something is freed that is not alive."""
    alive: dict[int, int] = {}

    def change(event: Event) -> int:
        number, size, _ = event
        if size:
            alive[number] = size
            return size
        return -alive.pop(number)

    found = list(accumulate(map(change, trace.events)))
    assert sum(alive.values()) == found[-1]
    return found


SCHEDULES = pytest.mark.parametrize(
    ("few", "many"),
    [
        (gpipe(0, 4), gpipe(0, 9)),
        (one_forward_one_backward(0, 2, 4), one_forward_one_backward(0, 8, 24)),
        (one_forward_one_backward(1, 2, 4), one_forward_one_backward(7, 8, 24)),
        (one_forward_one_backward(0, 2, 4), one_forward_one_backward(3, 8, 9)),
    ],
    ids=["gpipe", "first rank", "last rank", "another rank"],
)


@SCHEDULES
def test_actions_that_are_unrolled_make_and_free_what_a_whole_pipeline_does(few: list[Action], many: list[Action]) -> None:
    found = unroll_actions(toy(few), many)
    assert levels(found) == levels(toy(many))
    assert found.moments == toy(many).moments


@SCHEDULES
def test_the_peak_of_each_moment_is_known_by_owner_and_module(few: list[Action], many: list[Action]) -> None:
    found = peaks_by_moment(unroll_actions(toy(few), many))
    assert found == peaks_by_moment(toy(many))
    assert max(one.total() for one in found.values()) == max(levels(toy(many)))
    assert found["optimizer"][Owner.PARAMETERS, "", ""] == WEIGHTS
