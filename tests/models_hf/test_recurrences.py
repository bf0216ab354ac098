"""Recurrences and convolutions give what a loop over positions gives: in chunks, within documents, on several ranks, and a
token at a time."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from titan_core.api import Decoding, SequenceShare
from titan_models_hf.recurrent import convolution, linear_recurrence
from titan_models_hf.recurrent.convolution import CausalConvolution
from titan_models_hf.recurrent.linear_recurrence import LinearRecurrence, recurrence
from titan_testing.gloo_pool import GlooPool

BATCH, HEADS, KEY, VALUE = 2, 3, 6, 4


def loop(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Return the recurrence in fp64, position by position."""
    query, key, value, log_decay = (tensor.double() for tensor in (query, key, value, log_decay))
    state, results = torch.zeros(BATCH, HEADS, KEY, VALUE, dtype=torch.float64), []
    for place in range(query.shape[1]):
        if documents is not None and place:
            same = documents[:, place] == documents[:, place - 1]
            state = state * same[:, None, None, None]
        state = state * log_decay[:, place].exp()[..., None, None]
        new = value[:, place]
        if beta is not None:
            known = torch.einsum("bhkv,bhk->bhv", state, key[:, place])
            new = beta[:, place].double()[..., None] * (new - known)
        state = state + key[:, place].unsqueeze(-1) * new.unsqueeze(-2)
        results.append(torch.einsum("bhkv,bhk->bhv", state, query[:, place]))
    return torch.stack(results, dim=1)


def inputs(seq: int, delta: bool, masked: bool) -> tuple[list[Any], Tensor | None]:
    """Return the arguments of a recurrence, which need gradients, and documents."""
    generator = torch.Generator().manual_seed(seq)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(BATCH, seq, *shape, generator=generator)

    query, key = (F.normalize(drawn(HEADS, KEY), dim=-1) for _ in "qk")
    tensors = [query, key, drawn(HEADS, VALUE), -drawn(HEADS).abs(), drawn(HEADS).sigmoid()]
    documents = (torch.rand(BATCH, seq, generator=generator) < 0.08).long().cumsum(1) if masked else None
    return [tensor.requires_grad_() for tensor in tensors[: 5 if delta else 4]] + [None] * (not delta), documents


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def errors(output: Tensor, expected: Tensor, tensors: list[Any]) -> list[float]:
    """Return the relative errors of the output and of the gradients."""
    needed = [tensor for tensor in tensors if tensor is not None]
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(output, needed, gradient)
    wanted = torch.autograd.grad(expected, needed, gradient.double())
    return [error(output, expected), *(error(one, other) for one, other in zip(found, wanted, strict=True))]


@pytest.mark.parametrize("delta", [False, True], ids=["linear attention", "delta rule"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize(("seq", "chunk"), [(5, 64), (48, 16), (50, 16)])
def test_chunks_give_what_a_loop_gives(delta: bool, masked: bool, seq: int, chunk: int) -> None:
    tensors, documents = inputs(seq, delta, masked)
    output, _ = recurrence(*tensors, documents, chunk=chunk)
    assert max(errors(output, loop(*tensors, documents), tensors)) < 1e-5


def test_it_is_the_library_s_delta_rule() -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    tensors, _ = inputs(100, True, False)
    expected, _ = module.torch_chunk_gated_delta_rule(*tensors)
    output, _ = recurrence(tensors[0] * KEY**-0.5, *tensors[1:])
    torch.testing.assert_close(output, expected)


def convolved(module: CausalConvolution, x: Tensor, documents: Tensor | None) -> Tensor:
    """Return the convolution, position by position."""
    results = []
    for place in range(x.shape[1]):
        total = torch.zeros(BATCH, x.shape[2]) + (0.0 if module.bias is None else module.bias)
        for back in range(min(place, module.reach) + 1):
            addend = module.weight[:, 0, module.reach - back] * x[:, place - back]
            if documents is not None:
                addend = addend * (documents[:, place] == documents[:, place - back])[:, None]
            total = total + addend
        results.append(total)
    return torch.stack(results, dim=1)


def convolution_of(features: int, width: int) -> CausalConvolution:
    torch.manual_seed(0)
    module = CausalConvolution(features, width, bias=True)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
def test_a_convolution_stays_within_documents(masked: bool) -> None:
    module = convolution_of(5, 4)
    x, documents = torch.randn(BATCH, 20, 5), inputs(20, False, masked)[1]
    torch.testing.assert_close(module(x, documents), convolved(module, x, documents))


def on_ranks(seq: int, delta: bool, masked: bool, width: int) -> float:
    """Return the largest relative error of this rank's share of outputs and gradients."""
    dist.init_process_group("gloo")
    try:
        size = int(os.environ["WORLD_SIZE"])
        share = SequenceShare(
            init_device_mesh("cpu", (size,)), tuple((chunk, 2 * size - 1 - chunk) for chunk in range(size))
        )
        tensors, documents = inputs(seq, delta, masked)
        expected = loop(*tensors, documents)
        gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        needed = [tensor for tensor in tensors if tensor is not None]
        wanted = [expected, *torch.autograd.grad(expected, needed, gradient.double())]
        own = [None if tensor is None else share.take(tensor.detach(), 1).requires_grad_() for tensor in tensors]
        output = linear_recurrence.divided(LinearRecurrence(), share)(*own, documents)
        found = [output, *torch.autograd.grad(output, [one for one in own if one is not None], share.take(gradient, 1))]
        worst = max(error(one, share.take(other, 1)) for one, other in zip(found, wanted, strict=True))

        module = convolution_of(HEADS * VALUE, width)
        x = tensors[2].detach().flatten(2).requires_grad_()
        whole = convolved(module, x, documents)
        (of_x,) = torch.autograd.grad(whole, x, gradient.flatten(2))
        mine = share.take(x.detach(), 1).requires_grad_()
        part = convolution.divided(module, share)(mine, documents)
        (of_mine,) = torch.autograd.grad(part, mine, share.take(gradient.flatten(2), 1))
        pairs = ((part, whole), (of_mine, of_x))
        return max(worst, *(error(one, share.take(other, 1)) for one, other in pairs))
    finally:
        dist.destroy_process_group()


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("ranks", "seq", "width"),
    [(2, 48, 4), pytest.param(4, 64, 4, marks=pytest.mark.full), pytest.param(2, 8, 5, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("delta", [False, True], ids=["linear attention", "delta rule"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
def test_ranks_compute_their_share(gloo: GlooPool, ranks: int, seq: int, width: int, delta: bool, masked: bool) -> None:
    assert max(gloo.run(ranks, on_ranks, seq, delta, masked, width)) < 1e-5


@pytest.mark.parametrize("delta", [False, True], ids=["linear attention", "delta rule"])
@pytest.mark.parametrize("part", [3, 40])
def test_a_state_is_enough_to_continue(delta: bool, part: int) -> None:
    """Prompts of two lengths, padded, in parts; then a token at a time."""
    lengths, total = [13, 6], 20
    tensors, _ = inputs(total, delta, False)
    tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
    mixer, module = LinearRecurrence(), convolution_of(HEADS * VALUE, 4)
    expected = [mixer(*tensors), module(tensors[2].flatten(2))]
    decoding = Decoding(BATCH, total)
    found: list[list[list[Tensor]]] = [[[], []], [[], []]]

    def compute(positions: Tensor, real: Tensor | None) -> None:
        rows = torch.arange(BATCH)[:, None]
        own = [None if tensor is None else tensor[rows, positions] for tensor in tensors]
        with decoding.computing(positions, int(positions.max()) + 1, real), torch.no_grad():
            outputs = mixer(*own), module(own[2].flatten(2))  # type: ignore[union-attr]
        for number, output in enumerate(outputs):
            for row in range(BATCH):
                kept = positions[row] < (total if real is None else real[row])
                found[number][row].append(output[row, kept])

    for first in range(0, max(lengths), part):
        compute(torch.arange(first, min(first + part, max(lengths))).expand(2, -1), torch.tensor(lengths))
    for step in range(total - max(lengths)):
        compute(torch.tensor([[length + step] for length in lengths]), None)
    for number, whole in enumerate(expected):
        for row in range(BATCH):
            result = torch.cat(found[number][row])
            torch.testing.assert_close(result, whole[row, : len(result)], atol=1e-5, rtol=1e-4)
    assert decoding.mixers == {mixer, module}
