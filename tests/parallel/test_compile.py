"""What the compiler receives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from harness.small_gpt import LAYOUT, SmallGPT
from titan_core.api import ModelPart
from titan_core.model.next_token import NextToken
from titan_parallel import compile as compiler
from titan_parallel.config import ActivationCheckpointSection, CompileSection


def options_of_blocks(backend: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    part = ModelPart(SmallGPT(), LAYOUT, NextToken())
    part.fill("titan_parallel.compiler_options", "blocks.1.mlp", {"emulate_precision_casts": True})
    found: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **keywords: found.append(keywords["options"]))
    job = SimpleNamespace(section=lambda cls: ActivationCheckpointSection())
    section = CompileSection(backend=backend, components=["model"])
    compiler.apply(part, cast(Any, SimpleNamespace(section=section, job=job)))
    return found


def test_options_of_a_module_apply_to_its_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of_blocks("inductor", monkeypatch) == [None, {"emulate_precision_casts": True}]
    assert options_of_blocks("aot_eager", monkeypatch) == [None, None]  # they are inductor's
