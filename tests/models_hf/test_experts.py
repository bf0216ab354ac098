"""Experts computed from sorted rows are the library's eager ones, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.hf_families import config_of
from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.experts import compute_by_library, compute_by_rows
from titan_nn.experts import GroupedLinear

EXPERTS, PER_TOKEN, TOKENS, DIM = 4, 2, 20, 64
KINDS: dict[str, dict[str, Any]] = {
    "gate": {"architecture": "mixtral", "config": config_of("mixtral")[1]},
    "transposed, with biases": {"architecture": "gpt_oss", "config": config_of("gpt_oss")[1]},
    "transposed": {
        "architecture": "aria_text",
        "config": {"hidden_size": DIM, "intermediate_size": 32, "num_hidden_layers": 1, "moe_num_experts": EXPERTS},
    },
    "no gate": {
        "architecture": "nemotron_h",
        "config": {
            "hidden_size": DIM, "moe_intermediate_size": 32, "n_routed_experts": EXPERTS, "layers_block_type": ["moe"],
            "num_hidden_layers": 1,
        },
    },
}  # fmt: skip
"""What the library's modules of experts differ in."""


def experts_of(kind: str) -> Any:
    """Return the library's first module of experts, with random weights."""
    args = HFArgs(**KINDS[kind])
    with torch.device("meta"):
        model = library.build(library.configuration(args.architecture, args.config))
    found = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    found.to_empty(device="cpu")
    torch.manual_seed(3)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)
    return found


def computed(experts: Any, chosen: Tensor) -> list[Tensor]:
    """Return the outputs, and the gradients of the hidden states, of the weights of the choices and of all parameters."""
    torch.manual_seed(4)
    hidden = torch.randn(TOKENS, DIM, dtype=torch.double, requires_grad=True)
    weights = torch.rand(TOKENS, PER_TOKEN, dtype=torch.double, requires_grad=True)
    output = experts(hidden, chosen, weights)
    return [output.detach(), *torch.autograd.grad((output**2).sum(), [hidden, weights, *experts.parameters()])]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_library(kind: str) -> None:
    experts = experts_of(kind).double()
    names = list(experts.state_dict())
    # Nobody chooses the third expert.
    chosen = torch.tensor([0, 1, 3])[torch.rand(TOKENS, 3, generator=torch.Generator().manual_seed(5)).argsort()[:, :2]]
    expected = computed(experts, chosen)
    compute_by_rows(experts)
    assert list(experts.state_dict()) == names
    for found, one in zip(computed(experts, chosen), expected, strict=True):
        torch.testing.assert_close(found, one)
    compute_by_library(experts)
    assert all(torch.equal(found, one) for found, one in zip(computed(experts, chosen), expected, strict=True))


class Kernel(GroupedLinear):
    """The product as a kernel may compute it: rows of no expert hold ``left`` in its results, and NaN in the gradients."""

    def __init__(self, left: float) -> None:
        super().__init__()
        self._left = left

    def forward(self, rows: Tensor, weight: Tensor, counts: Tensor, *, masked: bool = True) -> Tensor:
        spoilt = torch.arange(len(rows)) >= counts.sum()
        if rows.requires_grad:
            rows.register_hook(lambda gradient: gradient.masked_fill(spoilt[:, None], torch.nan))
        return super().forward(rows, weight, counts, masked=masked).masked_fill(spoilt[:, None], self._left)


# An activation that clamps has no gradient at NaN, which would hide that of the product after it: so a number, too.
@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("product", [GroupedLinear(), Kernel(torch.nan), Kernel(0.5)], ids=["torch", "NaN", "number"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_no_expert_change_nothing_whatever_they_hold(kind: str, product: GroupedLinear) -> None:
    experts = experts_of(kind)
    compute_by_rows(experts)
    experts.titan_product = product
    counts, rows = torch.tensor([3, 0, 4, 1]), torch.randn(8, DIM)

    def gradients(rows: Tensor) -> list[Tensor]:
        rows = rows.clone().requires_grad_()
        output = experts.forward(rows, counts)
        return [output.detach()[:8], *torch.autograd.grad((output[:8] ** 2).sum(), [rows, *experts.parameters()])]

    alone, among = gradients(rows), gradients(torch.cat((rows, torch.full((3, DIM), torch.nan))))
    assert among[1][8:].count_nonzero() == 0
    among[1] = among[1][:8]
    for found, expected in zip(among, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_holds_a_call(kind: str) -> None:
    experts = experts_of(kind)
    compute_by_rows(experts)
    chosen = torch.rand(TOKENS, EXPERTS).topk(PER_TOKEN).indices
    hidden, weights = torch.randn(TOKENS, DIM), torch.rand(TOKENS, PER_TOKEN)

    def call(*arguments: Tensor) -> Tensor:
        result: Tensor = experts(*arguments)
        return result

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(hidden, chosen, weights), call(hidden, chosen, weights))
