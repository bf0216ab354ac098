"""Routers of the library are known by what they compute, and show transforms scores, logits and the bias of their choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.hf_families import config_of
from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.derive import derive
from titan_models_hf.routers import bias_of, on_random_numbers, return_scores, scores_of

EXPERTS, PER_TOKEN, TOKENS, DIM = 4, 2, 20, 64
BIAS = "e_score_correction_bias"
KNOWN = {
    "mixtral": ("softmax", None),
    "gpt_oss": ("softmax", None),  # it has a bias, of the logits
    "deepseek_v3": ("sigmoid", BIAS),
    "glm4_moe": ("sigmoid", BIAS),
    "llama": (None, None),
}
ROUTED = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]


def router_of(family: str) -> Any:
    """Return the library's router of the second block, with random weights."""
    architecture, config = config_of(family)
    torch.manual_seed(6)
    block = nn.ModuleList(library.build(library.configuration(architecture, config)).model.layers)[1].mlp
    router: Any = block.router if family == "gpt_oss" else block.gate
    for parameter in router.parameters():
        nn.init.normal_(parameter, std=0.3)
    return router


@pytest.mark.parametrize("family", KNOWN)
def test_routers_are_known_by_what_they_compute(family: str) -> None:
    architecture, config = config_of(family)
    args = HFArgs(architecture=architecture, config=config)
    facts, (scores, bias) = derive(args), KNOWN[family]
    assert len(facts.routers) == len(facts.experts) == {"llama": 0, "deepseek_v3": 3, "glm4_moe": 3}.get(family, 4)
    assert {(one.scores, one.bias) for one in facts.routers.values()} == ({(scores, bias)} if scores else set())
    assert all((one.experts, one.per_token) == (EXPERTS, PER_TOKEN) for one in facts.routers.values())


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_a_router_returns_scores_to_transforms_and_the_same_as_before_to_its_caller(family: str) -> None:
    router, hidden = router_of(family), torch.randn(TOKENS, DIM)
    logits, weights, chosen = router(hidden)
    names = list(router.state_dict())
    return_scores(router, str(KNOWN[family][0]))
    assert list(router.state_dict()) == names
    assert torch.equal(router(hidden)[1], weights) and torch.equal(router(hidden)[2], chosen)
    ours, choice, scores = router.forward(hidden)
    assert torch.equal(ours, weights) and torch.equal(choice, chosen)
    torch.testing.assert_close(scores, logits.softmax(-1) if family == "gpt_oss" else logits.sigmoid())


class Penalty(torch.autograd.Function):
    """Returns logits as they are, and adds the gradient of the sum of the squares of their log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        return gradient + 2 * logits.logsumexp(-1, keepdim=True) * logits.softmax(-1)


@pytest.mark.parametrize("family", ROUTED)
def test_a_loss_of_the_logits_reaches_the_router(family: str) -> None:
    """Although the weights are the library's own, to the bit."""
    router = router_of(family)
    hidden, factors = torch.randn(TOKENS, DIM, requires_grad=True), torch.randn(TOKENS, PER_TOKEN)
    inputs = [hidden, *router.parameters()]
    logits, weights, chosen = router(hidden)
    loss = (weights * factors).sum()
    plain = torch.autograd.grad(loss, inputs, retain_graph=True)
    expected = torch.autograd.grad(loss + torch.log(logits.exp().sum(-1)).square().sum(), inputs)
    return_scores(router, "sigmoid" if family == "deepseek_v3" else "softmax")

    def gradients() -> tuple[Tensor, ...]:
        _, ours, choice = router(hidden)
        assert torch.equal(ours, weights) and torch.equal(choice, chosen)
        return torch.autograd.grad((ours * factors).sum(), inputs)

    assert all(torch.equal(*pair) for pair in zip(gradients(), plain, strict=True))
    router.logits.forward = Penalty.apply
    for found, one, without in zip(gradients(), expected, plain, strict=True):
        assert (found - one).norm() <= 1e-6 * one.norm()
        assert (without - one).norm() > 0.1 * one.norm()


@pytest.mark.parametrize("changed", [False, True])
def test_one_graph_holds_a_call(changed: bool) -> None:
    router, hidden = router_of("deepseek_v3"), torch.randn(TOKENS, DIM)
    return_scores(router, "sigmoid")
    if changed:
        router.logits.forward = lambda logits: logits * 2
    compiled = torch.compile(lambda hidden: router(hidden), fullgraph=True, backend="eager")
    assert all(torch.equal(*pair) for pair in zip(compiled(hidden), router(hidden), strict=True))


class Own(nn.Module):
    """A router that computes weights of its logits in a way of its own, with a buffer ``extra``."""

    def __init__(
        self, values: Callable[[Tensor], Tensor], choose: Callable[[Tensor, Tensor], Tensor], persistent: bool = True
    ) -> None:
        super().__init__()
        self.values, self.choose = values, choose
        self.weight = nn.Parameter(torch.empty(EXPERTS, DIM, device="meta"))
        self.register_buffer("extra", torch.empty(EXPERTS, device="meta"), persistent=persistent)
        self.register_buffer("steps", torch.empty((), device="meta"))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        values = self.values(logits)
        chosen = self.choose(values, self.extra).topk(PER_TOKEN).indices
        return logits, values.gather(1, chosen), chosen


def test_a_router_with_other_weights_is_unknown() -> None:
    assert scores_of(*on_random_numbers(Own(torch.square, torch.add), (TOKENS, DIM))) is None


@pytest.mark.parametrize(
    ("router", "bias"),
    [
        (Own(torch.sigmoid, torch.add), "extra"),
        (Own(torch.sigmoid, torch.sub), None),
        (Own(torch.sigmoid, lambda scores, extra: scores), None),
        (Own(torch.sigmoid, torch.add, persistent=False), None),
    ],
    ids=["added", "subtracted", "unused", "not saved"],
)
def test_a_bias_of_the_choice_is_known_by_what_it_does(router: nn.Module, bias: str | None) -> None:
    router, hidden = on_random_numbers(router, (TOKENS, DIM))
    assert scores_of(router, hidden) == "sigmoid"
    assert bias_of(router, hidden) == bias
    assert not any(buffer.any() for buffer in router.buffers())


@pytest.mark.parametrize("where", ["weights", "logits"])
def test_a_bias_of_more_than_the_choice_is_unknown(where: str) -> None:
    class Weighted(Own):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden @ self.weight.T + (self.extra if where == "logits" else 0)
            values = logits.sigmoid() + (self.extra if where == "weights" else 0)
            chosen = values.topk(PER_TOKEN).indices
            return logits, values.gather(1, chosen), chosen

    router, hidden = on_random_numbers(Weighted(torch.sigmoid, torch.add), (TOKENS, DIM))
    assert scores_of(router, hidden) == "sigmoid"
    assert bias_of(router, hidden) is None
