"""Compiled blocks of transformers' families are one graph each, without a break, and compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from harness.hf_families import settings
from titan_core.api import hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

KINDS = {
    "llama": 1, "qwen3": 1, "phi3": 1, "mistral": 1,
    "gemma3": 2, "olmo3": 2,  # some blocks have a window
    "mixtral": 1, "gpt_oss": 2, "deepseek_v3": 2,  # experts; windows, a dense block
}  # fmt: skip
"""Family -> kinds of blocks. All blocks of a kind share a graph."""
STEPS = {"training.steps": 2, "training.global_batch_size": 2}


class Graphs:
    """Keeps what the compiler has counted: it is forgotten when the job ends."""

    def __init__(self) -> None:
        self.count, self.breaks = 0, list[str]()

    @hookimpl
    def titan_step_end(self) -> None:
        self.count, self.breaks = counters["stats"]["unique_graphs"], list(counters["graph_break"])


def compiled(overrides: dict[str, object]) -> tuple[list[float], list[float], int, list[str]]:
    """Train with compiled blocks. Return losses, gradient norms, and the graphs and breaks of a step."""
    torch.set_num_threads(1)
    counters["graph_break"].clear()  # those of jobs that this process ran before
    before = counters["stats"]["unique_graphs"]
    # Dynamo divides blocks into graphs, and this backend runs them as they are. By default, a break is an error.
    more = {
        "experts.metrics": "false",
        "compile.enable": "true",
        "compile.backend": "eager",
        "compile.components": '["model"]',
    }
    record = run_recipe("hf_debug", {**overrides, **more}, observers=[found := Graphs()])
    return record.losses, record.grad_norms, found.count - before, found.breaks


def eager(overrides: dict[str, object]) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    record = run_recipe("hf_debug", overrides)
    return record.losses, record.grad_norms


@pytest.mark.parametrize(
    "family", [family if family == "qwen3" else pytest.param(family, marks=pytest.mark.full) for family in KINDS]
)
def test_a_block_is_one_graph(tmp_path: Path, gloo: GlooPool, family: str) -> None:
    overrides = {**settings(family, "one", None, tmp_path / "run"), **STEPS}
    ((losses, norms, graphs, breaks),) = gloo.run(1, compiled, overrides)
    ((expected, expected_norms),) = gloo.run(1, eager, overrides)
    assert breaks == [] and graphs == KINDS[family]
    assert losses == pytest.approx(expected, rel=1e-6) and norms == pytest.approx(expected_norms, rel=1e-5)
