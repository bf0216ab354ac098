"""Routers of the library's models, which return what Titan's routers do.

The library's routers return (logits of all experts, weights of the chosen ones, their indices), and their callers use the
last two. Titan's return (weights, indices, scores of all experts), from which transforms that balance the experts compute.
The library's own forward still routes: what it computes, with which bias it chooses, is found by calls on random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from titan_models_hf.facts import Routing
from titan_models_hf.trace import Trace

_SCORES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}
"""Name -> function of the logits. The weights of a token's experts are proportional to their scores."""
_SURELY_CHOSEN = 100.0
"""A bias above the scores, or logits, of random numbers."""


def routers_of(model: Any, called: Trace, experts: Sequence[str], blocks: str) -> dict[str, Routing]:
    """Return what the routers beside the modules ``experts`` compute; empty unless each has one that Titan knows, no block
    has two, and all choose from as many experts."""
    beside = {name.rpartition(".")[0] for name in experts}
    found = {}
    for name, (shape, number, per_token) in called.routers.items():
        if name.rpartition(".")[0] in beside:
            router, hidden = on_random_numbers(model.get_submodule(name), shape)
            scores = scores_of(router, hidden)
            if scores is None:
                return {}
            bias = bias_of(router, hidden)
            found[name] = Routing(experts=number, per_token=per_token, scores=scores, bias=bias)
    of_blocks = {name.removeprefix(f"{blocks}.").partition(".")[0] for name in found}
    held = {model.get_submodule(name).num_experts for name in experts}
    alike = len(held) == 1 and {one.experts for one in found.values()} == held
    return found if alike and len(found) == len(of_blocks) == len(experts) else {}


def on_random_numbers(router: nn.Module, shape: Sequence[int]) -> tuple[nn.Module, Tensor]:
    """Return a copy of ``router`` on the CPU, with random parameters and zero buffers, and random hidden states.

    Args:
        shape: of the hidden states that it is called with.
    """
    router = copy.deepcopy(router).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(std=shape[-1] ** -0.5, generator=generator)
        for buffer in router.buffers():
            buffer.zero_()  # biases of the choice
    return router, torch.randn(*shape, generator=generator)


@torch.no_grad()
def scores_of(router: nn.Module, hidden: Tensor) -> str | None:
    """Return the name of the scores that ``router`` computes; ``None`` if its weights follow from none that Titan knows."""
    logits, weights, chosen = router(hidden)
    for name, scores in _SCORES.items():
        factors = weights / scores(logits).gather(-1, chosen)
        if factors.shape[-1] > 1 and torch.allclose(factors, factors[:, :1], rtol=1e-4):
            return name
    return None


@torch.no_grad()
def bias_of(router: nn.Module, hidden: Tensor) -> str | None:
    """Return the name of the only persistent buffer of ``router`` that is a bias of its choice: a number for each expert,
    with which tokens choose it, and which changes neither logits nor the function of them that the weights are; ``None`` if
    there is no such buffer, or more than one."""
    kept, (logits, *_), scores = router.state_dict(), router(hidden), scores_of(router, hidden)
    found = []
    for name, bias in router.named_buffers():
        if name in kept and bias.shape == logits.shape[1:] and bias.dtype == torch.float32:
            same = True
            for expert in (0, len(bias) - 1):
                bias[expert] = _SURELY_CHOSEN
                after, _, chosen = router(hidden)
                same &= bool((chosen == expert).any(-1).all()) and torch.equal(after, logits)
                same &= scores_of(router, hidden) == scores
                bias.zero_()
            found += [name] if same else []
    return found[0] if len(found) == 1 else None


def return_scores(router: nn.Module, scores: str) -> None:
    """Let ``router`` return what a :class:`titan_core.api.Router` does to transforms, and what it did to its caller."""
    cls: Any = type(router)
    router.__class__ = _returning_scores(cls, scores)
    router.logits = nn.Identity()


@cache
def _returning_scores(base: Any, scores: str) -> type:
    """Return a subclass of the library's class of routers ``base``."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = base.forward(self, hidden_states)
        logits = logits.float()
        returned = self.logits(logits)
        if returned is not logits:
            # A transform has added a loss, whose gradient arrives where that of its result does: zeros do. The library has
            # computed the weights by then, of the same logits.
            weights = weights + (0.0 * returned[:, :1]).to(weights.dtype)
        return weights, chosen, _SCORES[scores](returned)

    def call(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, chosen, of_all = nn.Module.__call__(self, hidden_states)
        return of_all, weights, chosen

    return type(base.__name__, (base,), {"__call__": call, "forward": forward})
