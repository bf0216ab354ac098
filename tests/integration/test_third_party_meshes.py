"""Third-party dimensions and views of the mesh, whose names no package of Titan knows."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from titan_core.api import Batch, Microbatch, UserError
from titan_core.api.parallel.microbatch import AuxiliaryLosses, microbatch_scope
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job

EP, TP = (f"parallelism.{name}_parallel_degree" for name in ("expert", "tensor"))
NO_SP = "parallelism.disable_sequence_parallel"


def backwards(forward: Callable[..., torch.Tensor], rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Call the experts in reverse order."""
    *pieces, unused = rows.split([*counts.tolist(), rows.shape[0] - int(counts.sum())])
    computed = forward(torch.cat(pieces[::-1]), counts.flip(0))
    return torch.cat([*computed.split(counts.flip(0).tolist())[::-1], unused])


def only_counted(forward: Callable[..., torch.Tensor], rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Call the experts with rows that must all belong to one."""
    assert int(counts.sum()) == rows.shape[0], "rows without an expert"
    return forward(rows, counts)


BROKEN = {"backwards": backwards, "only counted": only_counted}


def refusal(site: str, recipe: str, overrides: dict[str, object], ranks: int, broken: str = "", region: str = "") -> str:
    """Return the error of a job on ``ranks`` ranks, which need not exist; ``broken`` says what to do to its experts,
    ``region`` names further regions of its model."""
    from titan_core.model.layout_trial import try_model

    sys.path.insert(0, site)
    try:
        job = make_job(recipe, {"job.device": "cpu", **overrides}, ranks)
        if region:
            layout = replace(job.model.layout, regions=(*job.model.layout.regions, region))
            job = replace(job, model=replace(job.model, layout=layout))
        with torch.device("meta"):
            model: Any = job.model.build()
        if broken:
            experts = model.blocks[0].feed_forward.experts
            whole = type(experts).forward
            changed = {"forward": lambda self, *rest: BROKEN[broken](functools.partial(whole, self), *rest)}
            experts.__class__ = type("Broken", (type(experts),), changed)
        try_model(model, job, cast(Any, None), torch.device("cpu"))
    except UserError as error:
        return str(error)
    finally:
        sys.path.remove(site)
    return ""


REFUSED: dict[str, tuple[str, dict[str, object], int, dict[str, str], str]] = {
    "experts are divided": ("moe", {EP: 2}, 4, {}, ""),
    "among ranks of tensor parallelism": ("moe", {EP: 2, TP: 2}, 2, {}, ""),
    "no experts": ("llama3_debug", {EP: 2}, 2, {}, "has no experts that can be divided: no rule of its layout is Experts"),
    "more ranks than experts": (
        "moe", {EP: 8, "training.global_batch_size": 32}, 8, {}, "must divide the 4 experts of 'blocks.0.feed_forward.exp"
    ),
    "another number of ranks": (
        "moe", {EP: 3}, 4, {}, "borrows (dp_shard 4 x cp 1 x tp 1); set parallelism.expert_parallel_degree = 1, 2 or 4"
    ),
    "ranks with the same positions": (
        "moe", {EP: 4, TP: 2, NO_SP: "true"}, 4, {}, "(dp_shard 2 x cp 1); the 2 ranks of tp hold the same positions"
    ),
    "a region": (
        "moe", {EP: 2, TP: 2}, 2, {"region": "blocks.*.feed_forward"},
        "its ranks include those of tp, which hold the same positions in the region that 'blocks.0.feed_forward.exp",
    ),
    "another result": (
        "moe", {EP: 2}, 2, {"broken": "backwards"}, "module 'blocks.0.feed_forward' computes a different result"
    ),
    "an error": ("moe", {EP: 2}, 2, {"broken": "only counted"}, "(AssertionError: rows without an expert"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_divisions_of_experts_are_refused(gloo: GlooPool, experts: str, case: str) -> None:
    recipe, overrides, ranks, changes, message = REFUSED[case]
    (found,) = gloo.run(1, refusal, experts, recipe, overrides, ranks, **changes)
    assert message in found
    assert bool(message) == bool(found) and ("divided over 2 ranks, " in found) == ("broken" in changes)


def balance_beside_plain_torch(site: str) -> list[torch.Tensor]:
    """Return the balance loss of one block, its expected value, the router's gradient and its expected value."""
    sys.path.insert(0, site)
    try:
        from titan_model_moe.balance import ExpertBalance
        from titan_model_moe.config import MoEArgs
        from titan_model_moe.model import FeedForward
    finally:
        sys.path.remove(site)
    torch.manual_seed(0)
    batch, seq, args = 3, 8, MoEArgs(dim=16, expert_dim=8)
    module: Any = FeedForward(args, layer=0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(batch, seq, args.dim)
    facts = SimpleNamespace(batch=SimpleNamespace(seq_len=seq), mesh=SimpleNamespace(dims=()))
    module.balance = ExpertBalance(cast(Any, SimpleNamespace(section=SimpleNamespace(weight=0.3), job=facts, mesh={})))
    losses = AuxiliaryLosses(1 / (batch * seq))
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    with microbatch_scope(Microbatch(Batch(tokens, tokens), 1, 0, losses)):
        (0.0 * module(x).sum()).backward()
    gradient = module.router.weight.grad
    probabilities = (x @ module.router.weight.T).softmax(-1)
    expected = torch.zeros(())
    for one in probabilities:  # a sequence
        busy = torch.stack([(one.topk(2).indices == expert).any(1).float().mean() / 2 for expert in range(4)])
        expected = expected + 0.3 * 4 * (busy * one.mean(0)).sum() / batch
    (expected_gradient,) = torch.autograd.grad(expected, module.router.weight)
    return [losses.values["expert_balance"], expected.detach(), gradient, expected_gradient]


def test_a_balance_loss_matches_the_formula(gloo: GlooPool, experts: str) -> None:
    ((value, expected, gradient, expected_gradient),) = gloo.run(1, balance_beside_plain_torch, experts)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
