# ruff: noqa: E501 - one plant per line reads best
"""Third-party plugins whose divided gradients are wrong are refused before the first step, with the parameter and the
dimension of the mesh."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness.own_mixers import twice
from titan_core.api import UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

EP, TP, CP = (f"parallelism.{name}_parallel_degree" for name in ("expert", "tensor", "context"))
MOE: dict[str, object] = {
    "model.args": "{dim = 32, expert_dim = 24}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 1,
    "lr_scheduler.warmup_steps": 1,
    "job.device": "cpu",
}
BALANCED = {"expert_balance.weight": 0.5}


def rows_detached(patch: pytest.MonkeyPatch) -> None:
    from titan_experts import dispatch

    exchange = dispatch.exchange_rows
    patch.setattr(dispatch, "exchange_rows", lambda rows, *rest: exchange(rows.detach() + 0.0 * rows, *rest))


def rows_doubled(patch: pytest.MonkeyPatch) -> None:
    from titan_experts import dispatch

    exchange = dispatch.exchange_rows
    patch.setattr(dispatch, "exchange_rows", lambda rows, *rest: twice(exchange(rows, *rest)))


def experts_doubled(patch: pytest.MonkeyPatch) -> None:
    from titan_experts import divide

    substituted = divide.substituted_parameters

    def doubled(module: Any, tensors: dict[str, Tensor]) -> Any:
        return substituted(module, {name: twice(tensor) for name, tensor in tensors.items()})

    patch.setattr(divide, "substituted_parameters", doubled)


def one_expert_untrained(patch: pytest.MonkeyPatch) -> None:
    from titan_experts import divide

    substituted = divide.substituted_parameters

    def partly(module: Any, tensors: dict[str, Tensor]) -> Any:
        first = next(iter(tensors))
        return substituted(module, {name: tensor.detach() if name == first else tensor for name, tensor in tensors.items()})

    patch.setattr(divide, "substituted_parameters", partly)


def balance_of_own_positions(patch: pytest.MonkeyPatch) -> None:
    from titan_model_moe import balance

    whole = balance.ExpertBalance.__init__

    def own(self: Any, context: Any) -> None:
        whole(self, context)
        self._sequence.clear()

    patch.setattr(balance.ExpertBalance, "__init__", own)


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, object], str]] = {
    "rows detached": (rows_detached, {EP: 2}, r"on dp_shard=2, ep=2 \(.*expert_parallel.*receives"),
    "rows doubled": (rows_doubled, {EP: 2}, r"on dp_shard=2, ep=2[ :].*feed_forward.experts.\w+' receives 2 times"),
    "experts doubled": (experts_doubled, {EP: 2}, r"on dp_shard=2, ep=2[ :].*feed_forward.experts.\w+' receives 2 times"),
    "experts untrained": (one_expert_untrained, {EP: 2, CP: 2}, r"on cp=2, ep=2[ :].*feed_forward.experts.\w+' receives no gradient"),
    "balance of own positions": (balance_of_own_positions, {CP: 2, **BALANCED}, r"on cp=2 .*'blocks.\d.feed_forward.router.weight' receives"),
}  # fmt: skip


def train(site: str, folder: str, name: str | None, overrides: dict[str, object]) -> str:
    """Train one step with the plant ``name``; return why that was refused."""
    os.chdir(folder)
    sys.path.insert(0, site)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if name is not None:
                PLANTS[name][0](patch)
            run_recipe("moe", {**MOE, **overrides})
    except UserError as error:
        return str(error)
    finally:
        sys.path.remove(site)
    return ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if number == 1 else pytest.mark.full) for number, name in enumerate(PLANTS)]
)
def test_wrong_gradients_of_experts_are_refused(gloo: GlooPool, experts: str, tmp_path: Path, name: str) -> None:
    _, overrides, message = PLANTS[name]
    first, second = gloo.run(2, train, experts, str(tmp_path), name, overrides)
    assert first == second
    assert re.search(message, first), first


@pytest.mark.parametrize("overrides", [{EP: 2, CP: 2, **BALANCED}], ids=str)
def test_correct_experts_train(gloo: GlooPool, experts: str, tmp_path: Path, overrides: dict[str, object]) -> None:
    assert gloo.run(2, train, experts, str(tmp_path), None, overrides) == ["", ""]
