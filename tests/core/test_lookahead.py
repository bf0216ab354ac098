"""Facts that all ranks know before a step: totals, the end of data, mistakes, requests."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from harness.one_of_many import ISLANDS, OneOfMany
from titan_core.api import SharedRequest, UserError, World
from titan_core.api.observe.shared_request import SharedRequests
from titan_core.data.loader import StepData
from titan_core.loop.lookahead import Lookahead


class Loader:
    """Returns one step's data, or raises."""

    def __init__(self, step: StepData | UserError | None) -> None:
        self.step = step

    def peek(self) -> StepData | None:
        if isinstance(self.step, UserError):
            raise self.step
        return self.step


STEP = StepData([], epoch=0, targets_by_dataset=[5, 2], target_weight=6.5, corrupt=3, empty=4)


def look(world: World, step: StepData | UserError | None, requests: SharedRequests | None = None) -> Any:
    return Lookahead(cast(Any, Loader(step)), world, requests or SharedRequests(), datasets=2).take()


def test_totals_are_sums_over_ranks() -> None:
    totals = look(OneOfMany({}), STEP)
    assert (totals.num_targets, totals.weight, totals.replica_weight, totals.by_dataset) == (7, 6.5, 6.5, [5, 2])
    assert (totals.corrupt, totals.empty) == (3, 4)
    assert not totals.data_ended
    world = OneOfMany({"dp_shard": 2})
    object.__setattr__(world, "others", torch.tensor([0, 0, 0, 1, 2, 10, 20, 0.25]))
    totals = look(world, STEP)
    assert (totals.num_targets, totals.by_dataset, totals.corrupt, totals.empty) == (37, [15, 22], 4, 6)
    assert totals.weight == 6.75
    assert not totals.data_ended


def test_counts_of_any_size_are_exact() -> None:
    large = StepData([], epoch=0, targets_by_dataset=[2**24 + 1, 2**40 + 1], target_weight=2.0**24 + 1, corrupt=0, empty=0)
    totals = look(OneOfMany({}), large)
    assert (totals.num_targets, totals.weight) == (2**24 + 2**40 + 2, 2**24 + 1)


@pytest.mark.parametrize(("dim", "counted"), [("tp", 0), ("pp", 0), ("cp", 0), ("dp_shard", 7), ("dp_replicate", 7)])
def test_ranks_that_see_the_same_tokens_count_them_once(dim: str, counted: int) -> None:
    world = OneOfMany({dim: 2}, {dim: 1})
    assert look(world, STEP).num_targets == counted
    assert cast(Any, world).summed[0].tolist() == [0, 0, 0, *([3, 4, 5, 2, 6.5] if counted else [0] * 5)]


def test_the_end_of_one_ranks_data_ends_all() -> None:
    assert look(OneOfMany({}), None).data_ended
    world = OneOfMany({"dp_shard": 2})
    object.__setattr__(world, "others", torch.tensor([1, 0, 0, 0, 0, 0, 0, 0]))
    assert look(world, STEP).data_ended


def test_one_ranks_mistake_is_an_error() -> None:
    with pytest.raises(UserError, match="the data: is bad"):
        look(OneOfMany({}), UserError.one("the data", "is bad"))


def test_requests_travel_with_the_totals() -> None:
    mine, theirs, none = SharedRequest(), SharedRequest(), SharedRequest()
    mine.submit()
    world = OneOfMany({"dp_shard": 2})
    object.__setattr__(world, "others", torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
    look(world, STEP, SharedRequests([mine, theirs, none]))
    assert cast(Any, world).summed[0].tolist() == [0, 0, 0, 1, 0, 0, 3, 4, 5, 2, 6.5]
    assert [request.agreed for request in (mine, theirs, none)] == [True, True, False]
    assert [request.pending for request in (mine, theirs, none)] == [False, False, False]


def test_a_replicas_targets_are_those_of_its_ranks() -> None:
    world = OneOfMany({"islands": 2}, extra=(ISLANDS,))
    object.__setattr__(world, "sum", lambda tensor: tensor + torch.tensor([0, 0, 0, 0, 0, 100, 0, 90]))
    object.__setattr__(world, "sum_over_replica", lambda tensor: tensor + 1)
    totals = look(world, STEP)
    assert (totals.num_targets, totals.weight, totals.replica_weight) == (107, 96.5, 7.5)


def test_a_request_is_taken_once_and_may_be_made_again_meanwhile() -> None:
    request = SharedRequest()
    assert not request.take()
    request.submit()
    assert not request.take()  # the others do not know yet
    request.agree(sent=True, anywhere=True)
    assert not request.pending
    request.agree(sent=False, anywhere=False)  # at the next step, where it was not taken yet
    request.submit()  # while it is agreed on: it counts for the next time
    request.agree(sent=False, anywhere=False)
    assert request.pending
    assert request.take()
    assert not request.take()


def test_requests_are_complete_once_training_begins() -> None:
    requests = SharedRequests([SharedRequest()])
    assert len(list(requests)) == 1
    new = requests.new()
    assert list(requests)[1] is new
    requests.complete(OneOfMany({}))
    with pytest.raises(RuntimeError, match="after titan_train_start"):
        requests.new()
