"""Sums over replica groups: the groups here are threads of a story, played one after the other by fakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_core.api import Batch, ModelPart, ObjectiveFunction, UserError, Vocabulary
from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums, StepCounts
from titan_ft import gradients
from titan_ft.gradients import sum_step
from titan_ft.step import share


class Group:
    """One of two groups: adds, to each tensor that this group sums, what the other one contributes."""

    participants = 2

    def __init__(self, rank: int, other: list[Tensor]) -> None:
        self.rank, self._other = rank, other
        self.summed: list[int] = []
        self.rejected = ""

    def sum(self, tensor: Tensor) -> None:
        self.summed.append(tensor.numel())
        tensor += self._other.pop(0)

    def failed(self) -> bool:
        return False

    def reject(self, why: str) -> None:
        self.rejected = why


class Measured(ObjectiveFunction):
    metrics = ("accuracy",)

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        raise NotImplementedError  # the part has gradients already, and computes no loss


def part_with(*values: list[float] | None) -> ModelPart:
    """Return a part whose parameters have the gradients ``values``."""
    module = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in values)
    for parameter, value in zip(module, values, strict=True):
        parameter.grad = None if value is None else torch.tensor(value)
    part: Any = ModelPart(module, layout=None, objective=Measured())  # type: ignore[arg-type]
    part.auxiliary_losses = ("balance",)
    return part


def header(first: int, digest: int, loss: float, balance: float, divided: int, present: list[int]) -> Tensor:
    return torch.tensor([first, digest, loss, balance, divided, *present, 3.0, 4.0], dtype=torch.float64)


def test_the_sums_of_two_groups() -> None:
    """The first parameter has a gradient in both groups, the second in the other, the third in none."""
    part = part_with([1.0, 2.0], None, None)
    auxiliary = AuxiliaryLosses(1.0)  # this group's share has none
    other = Group(0, [header(0, 7, 0.25, 0.5, 1, [1, 1, 0]), torch.tensor([10.0, 20.0, 3.0, 4.0, 0.0, 0.0])])
    metrics = MetricSums({"accuracy": torch.tensor([1.5, 2.0], dtype=torch.float64)})
    loss = sum_step(other, [part], torch.tensor(0.5), auxiliary, metrics, digest=7)  # type: ignore[arg-type]
    assert loss.item() == 0.75 and loss.dtype is torch.float32
    first, second, third = part.module.parameters()
    assert first.grad.tolist() == [11.0, 22.0] and second.grad.tolist() == [3.0, 4.0] and third.grad is None
    assert auxiliary.values["balance"].item() == 0.5 and auxiliary.divided == {"balance"}
    assert metrics.values["accuracy"].tolist() == [4.5, 6.0]
    assert not other.rejected


def test_large_gradients_are_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 12)
    part = part_with([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])
    group = Group(0, [header(0, 7, 0.0, 0.0, 0, [1, 1, 1]), torch.ones(4), torch.ones(2)])
    sum_step(group, [part], torch.tensor(0.0), AuxiliaryLosses(1.0), MetricSums(), digest=7)  # type: ignore[arg-type]
    assert group.summed == [10, 4, 2]
    assert [parameter.grad.tolist() for parameter in part.module.parameters()] == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def test_gradients_of_each_type_are_summed_in_that_type() -> None:
    part = part_with([1.0, 2.0], [3.0, 4.0])
    second = list(part.module.parameters())[1]
    second.data, second.grad = second.data.bfloat16(), torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    others = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]
    group = Group(0, [header(0, 7, 0.0, 0.0, 0, [1, 1]), *others])
    sum_step(group, [part], torch.tensor(0.0), AuxiliaryLosses(1.0), MetricSums(), digest=7)  # type: ignore[arg-type]
    assert group.summed == [9, 2, 2]
    assert [parameter.grad.tolist() for parameter in part.module.parameters()] == [[2.0, 3.0], [4.0, 5.0]]


def test_statistics_are_summed_as_integers() -> None:
    """And in no group if the model has none."""
    part, statistics = part_with(), StepCounts({"rows": (2,)}, torch.device("cpu"), ranks=1, first=True)
    statistics.add("rows", (), torch.tensor([2**53 + 1, 1]), divided=False)
    header_of_other = torch.tensor([0.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    group: Any = Group(0, [header_of_other, torch.tensor([2**53 + 1, 5])])
    sum_step(group, [part], torch.tensor(0.0), AuxiliaryLosses(1.0), MetricSums(), 7, statistics)
    assert statistics.values["rows"].tolist() == [2**54 + 2, 6]
    none: Any = Group(0, [header_of_other])
    without = StepCounts({}, torch.device("cpu"), ranks=1, first=True)
    sum_step(none, [part], torch.tensor(0.0), AuxiliaryLosses(1.0), MetricSums(), 7, without)
    assert len(none.summed) == 1


def test_a_group_with_another_job_ends_and_the_others_reject_its_sums() -> None:
    part = part_with([1.0, 2.0])
    zeros = torch.zeros(2)
    mine = Group(1, [header(9, 9, 0.0, 0.0, 0, [1]), zeros])
    with pytest.raises(UserError, match="this replica group: runs another job than the first group"):
        sum_step(mine, [part], torch.tensor(0.0), AuxiliaryLosses(1.0), MetricSums(), digest=7)  # type: ignore[arg-type]
    first = Group(0, [header(0, 9, 0.0, 0.0, 0, [1]), zeros])
    sum_step(first, [part], torch.tensor(0.0), AuxiliaryLosses(1.0), MetricSums(), digest=7)  # type: ignore[arg-type]
    assert first.rejected


def test_the_shares_of_all_groups_are_all_microbatches() -> None:
    """Each once, in order, and as equal as possible."""
    for microbatches in range(1, 14):
        for groups in range(1, 9):
            shares = [share(microbatches, rank, groups) for rank in range(groups)]
            assert [number for one in shares for number in one] == list(range(microbatches))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
