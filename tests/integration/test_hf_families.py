"""Families of transformers on two ranks: losses and first gradients are those of a plain loop of the library on one device.
``benchmarks/hf_families.py`` makes the whole table of families and meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness import model_trials, small_gpt
from harness.gloo_pool import GlooPool
from harness.hf_families import (
    MESHES,
    gradient_difference,
    largest_difference,
    of_library,
    settings,
    train,
    train_and_reference,
)
from harness.jobs import run_recipe
from harness.oracle import write_documents
from titan_core.api import UserError
from titan_models_hf.config import HFArgs
from titan_models_hf.layout import define

CELLS = [
    ("mixtral", "one", True),
    ("qwen3", "cp2", True),
    ("gemma2", "pp2", False),
    ("deepseek_v3", "tp2", False),
    ("qwen3_next", "cp2", True),
    ("gpt_oss", "ep2", True),
    *(
        pytest.param(*cell, marks=pytest.mark.full)
        for cell in (
            ("gpt_oss", "one", True),
            ("llama", "tp2", False),
            ("granite", "tp2", False),
            ("mixtral", "fsdp2", False),
            ("gemma3", "cp2", True),
            ("gpt_oss", "tp2", False),
            ("falcon_h1", "tp2 cp2", True),
            ("qwen3_moe", "ep2", False),
            ("phi3", "tp2", False),
            ("qwen3_next", "tp2", False),
            ("qwen3_next", "pp2", False),
            ("falcon_h1", "pp2", False),
            ("gemma2", "cp2x2 by both", True),
            ("deepseek_v3", "cp4 by heads", False),
            ("mixtral", "ep2 pp2", False),
            ("olmoe", "ep4", False),
            ("deepseek_v3", "ep2 tp2", False),
            ("glm4_moe", "ep2 tp2", True),
            ("gpt_oss", "ep2 fsdp2", False),
        )
    ),
    *(
        pytest.param(*cell, marks=pytest.mark.long)
        for cell in (
            ("glm4", "tp2", False),
            ("qwen3_next", "fsdp2", False),
            ("falcon_h1", "tp2", False),
            ("falcon_h1", "cp2", False),
            ("gpt_oss", "cp2 by heads", True),
            ("olmo3", "cp4", False),
            ("qwen3_next", "cp2x2 by both", True),
            ("qwen3_next", "ep2 tp2", True),
            *(
                (family, mesh, False)
                for family in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe")
                for mesh in ("ep2", "ep4", "ep2 tp2", "ep2 cp2", "ep2 pp2")
                if (family, mesh)
                not in {("qwen3_moe", "ep2"), ("mixtral", "ep2 pp2"), ("olmoe", "ep4"), ("deepseek_v3", "ep2 tp2")}
            ),
        )
    ),
]


@pytest.mark.parametrize(("family", "mesh", "documents"), CELLS)
def test_equals_the_library(tmp_path: Path, gloo: GlooPool, family: str, mesh: str, documents: bool) -> None:
    data = write_documents(tmp_path / "documents.jsonl") if documents else None
    ((_, expected),) = gloo.run(1, train_and_reference, family, settings(family, "one", data, tmp_path / "one"))
    ranks = gloo.run(MESHES[mesh][0], train, settings(family, mesh, data, tmp_path / "mesh"))
    gradients = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
    assert largest_difference(ranks[0].losses, expected.losses) < 2e-6
    assert gradient_difference(of_library(family, gradients), expected.gradients)[0] < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.full)])
def test_selective_recomputation_of_experts_changes_nothing(tmp_path: Path, gloo: GlooPool, family: str) -> None:
    """Routers of the library change the result of ``topk`` in place, which is one that is saved."""
    whole = settings(family, "one", None, tmp_path / "one")
    again = {**whole, "activation_checkpoint.mode": "selective", "job.dump_folder": str(tmp_path / "again")}
    (one,), (two,) = gloo.run(1, train, whole), gloo.run(1, train, again)
    assert two.losses == one.losses
    assert all(torch.equal(two.gradients[name], gradient) for name, gradient in one.gradients.items())


@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh"), [("deepseek_v3", "ep2 tp2"), ("gpt_oss", "ep2 pp2")])
def test_experts_are_balanced_as_on_one_device(tmp_path: Path, gloo: GlooPool, family: str, mesh: str) -> None:
    balance = {"experts.balance": "global", "experts.balance_weight": 0.5}
    (one,) = gloo.run(1, run_recipe, "hf_debug", {**settings(family, "one", None, tmp_path / "one"), **balance})
    overrides = {**settings(family, mesh, None, tmp_path / "mesh"), **balance}
    for record in gloo.run(MESHES[mesh][0], run_recipe, "hf_debug", overrides):
        assert record.statistics == one.statistics
        assert largest_difference(record.losses, one.losses) < 2e-6
        for step, expected in zip(record.auxiliary, one.auxiliary, strict=True):
            assert step == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
def test_heads_that_tensor_parallelism_does_not_divide_are_computed_on_each_rank(tmp_path: Path, gloo: GlooPool) -> None:
    """The library has no plan for this attention, so that its region is whole."""
    config = {
        "vocab_size": 288, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.15,
    }  # fmt: skip
    args = ", ".join(f"{key} = {value}" for key, value in config.items())
    own = {"model.args": f'{{architecture = "stablelm", config = {{{args}}}}}'}
    (one,) = gloo.run(1, train, {**settings("llama", "one", None, tmp_path / "one"), **own})
    for mesh in ("tp2", "tp2 whole"):
        ranks = gloo.run(MESHES[mesh][0], train, {**settings("llama", mesh, None, tmp_path / "mesh"), **own})
        assert largest_difference(ranks[0].losses, one.losses) < 2e-6
        gradients = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
        assert gradient_difference(gradients, one.gradients)[0] < 1e-5


@pytest.mark.parametrize("mesh", ["CP", "TP"])
def test_a_convolution_that_no_parallelism_divides_is_named(mesh: str) -> None:
    """And not the angles of positions, which the model computes before and which are the same for all sequences."""
    config = {
        "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "layer_types": ["conv", "full_attention"],
    }  # fmt: skip
    definition = define(HFArgs(architecture="lfm2", config=config))
    named = r"module 'model\.layers\.0\.conv', before it calls 'model\.layers\.0\.conv\.out_proj'"
    with pytest.raises(UserError, match=named) as raised:
        model_trials.require(small_gpt.job_of(definition, model_trials.MESHES[mesh], 2))
    assert "rotary_emb" not in str(raised.value) and "Error:" not in str(raised.value)
