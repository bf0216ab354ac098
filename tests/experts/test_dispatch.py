"""Rows reach their experts on other ranks, and the outputs come back, with the numbers and gradients of one device."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from titan_experts.dispatch import AllToAll, Dispatch, Padded
from titan_nn.experts import inverse, move_rows
from titan_testing.gloo_pool import GlooPool

EXPERTS, DIM = 4, 3


def of_experts(weights: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return each row times the weight of its expert, and NaN for rows of none: what they hold must not matter."""
    pieces = rows.split([*counts.tolist(), rows.shape[0] - int(counts.sum())])
    return torch.cat([piece * weight for piece, weight in zip(pieces, weights, strict=False)] + [pieces[-1] * torch.nan])


def counts_of(kind: str, rank: int) -> Tensor:
    """Return the number of a rank's rows for each expert."""
    if kind == "all to the last":
        return torch.tensor([0, 0, 0, 8])
    if kind == "each rank to another":
        return torch.tensor([4, 4, 0, 0]) if rank % 2 else torch.tensor([0, 0, 5, 3])
    return torch.tensor([(rank + 3 * expert) % 4 for expert in range(EXPERTS)])


def dispatched(kind: str, dispatch: str, share: float, tail: int) -> tuple[Tensor, ...]:
    """Return outputs, the gradient of the rows, that of all ranks' weights, and what one device computes of each."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        counts = counts_of(kind, rank)
        used = int(counts.sum())
        rows = torch.randn(used + tail, DIM, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        weights = torch.arange(1.0, EXPERTS + 1)[:, None].expand(-1, DIM).contiguous()
        mine = weights.chunk(ranks)[rank].clone().requires_grad_()
        send: Dispatch = AllToAll(mesh) if dispatch == "alltoall" else Padded(mesh, lambda _: math.ceil(share * 8))
        outputs = send(rows, counts, lambda *arguments: of_experts(mine, *arguments), None)
        (outputs[:used] ** 2).sum().backward()
        assert rows.grad is not None and mine.grad is not None
        gradients = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(gradients, mine.grad)

        alone, whole = rows.detach().clone().requires_grad_(), weights.clone().requires_grad_()
        expected = of_experts(whole, alone[:used], counts)
        (expected**2).sum().backward()
        assert alone.grad is not None and whole.grad is not None
        dist.all_reduce(whole.grad)
        results = outputs[:used], rows.grad, torch.cat(gradients), expected, alone.grad, whole.grad
        return tuple(result.detach() for result in results)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dispatch", ["alltoall", "device"])
@pytest.mark.parametrize("kind", ["uneven", "all to the last", "each rank to another"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_outputs_and_gradients_are_those_of_one_device(gloo: GlooPool, ranks: int, kind: str, dispatch: str) -> None:
    for outputs, rows, weights, expected, rows_alone, weights_alone in gloo.run(ranks, dispatched, kind, dispatch, 1.0, 3):
        assert torch.equal(outputs, expected)
        assert torch.equal(rows, rows_alone)  # also zero for the rows of no expert
        torch.testing.assert_close(weights, weights_alone, rtol=1e-6, atol=0.0)


def test_more_rows_than_the_capacity_make_the_outputs_nan(gloo: GlooPool) -> None:
    """Those of the rank that cannot send them, so that the step fails; nothing is dropped silently."""
    results = gloo.run(2, dispatched, "each rank to another", "device", 0.5, 0)
    assert all(outputs.isnan().all() for outputs, *_ in results)
    results = gloo.run(2, dispatched, "uneven", "device", 0.75, 0)
    assert all(torch.equal(outputs, expected) for outputs, _, _, expected, *_ in results)


class Recorded(TorchDispatchMode):
    """Records the operators that run: what they compute first, "start" and "wait" for exchanges of fp32, and "beside"."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {"all_to_all_single": "start", "wait_tensor": "wait", "tanh": "beside", "tanh_backward": "beside"}
        name = names.get(func.overloadpacket.__name__)
        if name and args[0].is_floating_point():
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def beside_a_dispatch(dispatch: str) -> tuple[list[str], list[str], bool]:
    """Return what runs in the forward and the backward pass, and whether the numbers are those of one after the other."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        send: Dispatch = AllToAll(mesh) if dispatch == "alltoall" else Padded(mesh, lambda _: 8)
        counts, factors = counts_of("uneven", rank), torch.arange(1.0, EXPERTS + 1).chunk(ranks)[rank]
        source = torch.randn(int(counts.sum()), DIM, generator=torch.Generator().manual_seed(rank)).requires_grad_()

        def compute(rows: Tensor, counts: Tensor) -> Tensor:
            return of_experts(factors, rows, counts)

        results: list[Tensor] = []
        with Recorded() as forward:
            outputs = send(source * 2, counts, compute, lambda: results.append((source * 3).tanh()))
        with Recorded() as backward:
            (outputs * results[0]).sum().backward()
        (gradient,) = torch.autograd.grad(
            (send(source * 2, counts, compute, None) * (source * 3).tanh()).sum(), source, retain_graph=True
        )
        assert source.grad is not None
        return forward.found, backward.found, torch.equal(gradient, source.grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dispatch", ["alltoall", "device"])
def test_something_else_is_computed_while_rows_are_on_their_way_in_both_directions(gloo: GlooPool, dispatch: str) -> None:
    for forward, backward, equal in gloo.run(2, beside_a_dispatch, dispatch):
        assert forward == ["start", "beside", "wait", "start", "wait"]
        assert backward == ["start", "wait", "start", "beside", "wait"]
        assert equal


def test_move_is_indexing_with_a_gradient_by_gathering() -> None:
    rows = torch.randn(5, DIM, requires_grad=True)
    order = torch.tensor([3, -1, 0, 4])
    moved = move_rows(rows, order, inverse(order, 5), partial=True)
    expected = torch.stack([rows[3], torch.zeros(DIM), rows[0], rows[4]])
    assert torch.equal(moved, expected)
    factors = torch.randn(4, DIM)
    assert torch.equal(*(torch.autograd.grad((result * factors).sum(), rows)[0] for result in (moved, expected)))
    nothing = move_rows(rows[:0], torch.tensor([-1, -1]), torch.tensor([], dtype=torch.int64), partial=True)
    assert nothing.tolist() == [[0.0] * DIM] * 2
