"""What the compiler receives."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from harness.small_gpt import LAYOUT, SmallGPT
from titan_core.api import ModelPart, hookimpl
from titan_core.model.next_token import NextToken
from titan_parallel import compile as compiler
from titan_parallel.config import ActivationCheckpointSection, CompileSection
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe
from titan_testing.meshes import CP, FAST, HEADS


def options_of_blocks(backend: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    part = ModelPart(SmallGPT(), LAYOUT, NextToken())
    part.fill("titan_parallel.compiler_options", "blocks.1.mlp", {"emulate_precision_casts": True})
    found: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **keywords: found.append(keywords["options"]))
    monkeypatch.setattr(compiler, "gathered_within_blocks", lambda part, context: [])
    monkeypatch.setattr(compiler, "on_views", lambda part, mesh: [])
    job = SimpleNamespace(section=lambda cls: ActivationCheckpointSection())
    section = CompileSection(backend=backend, components=["model"])
    compiler.apply(part, cast(Any, SimpleNamespace(section=section, job=job, mesh=None)))
    return found


def test_options_of_a_module_apply_to_its_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of_blocks("inductor", monkeypatch) == [None, {"emulate_precision_casts": True}]
    assert options_of_blocks("aot_eager", monkeypatch) == [None, None]  # they are inductor's


def graphs_of(folder: str, overrides: dict[str, object]) -> int:
    """Return how many graphs of blocks and of the loss are compiled in two steps."""
    from torch._dynamo.utils import counters

    os.chdir(folder)
    before = counters["stats"]["unique_graphs"]
    run_recipe("tiny", {**FAST, **COMPILED, **overrides}, observers=[found := Graphs()])
    return found.compiled - before


class Graphs:
    """Keeps the number of graphs that have been compiled: it is forgotten when the job ends."""

    compiled = 0

    @hookimpl
    def titan_step_end(self) -> None:
        from torch._dynamo.utils import counters

        self.compiled = counters["stats"]["unique_graphs"]


COMPILED: dict[str, object] = {
    "compile.enable": "true",
    "compile.backend": "aot_eager",
    "training.steps": 2,
    "lr_scheduler.warmup_steps": 1,
}
DIVIDED: dict[str, tuple[int, dict[str, object]]] = {
    "CP 2": (2, {CP: 2}),
    "CP 2 by heads": (2, {CP: 2, HEADS: 2}),
    "CP 4, 2 by heads": (4, {CP: 4, HEADS: 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", DIVIDED)
def test_one_graph_serves_all_blocks_that_divide_sequences(gloo: GlooPool, tmp_path: Path, case: str) -> None:
    ranks, overrides = DIVIDED[case]
    assert gloo.run(ranks, graphs_of, str(tmp_path), overrides) == [2] * ranks  # one of four blocks, and the loss
