"""Families of transformers on two ranks: losses and first gradients are those of a plain loop of the library on one device.
``benchmarks/hf_families.py`` makes the whole table of families and meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from harness import model_trials, small_gpt
from harness.hf_families import (
    MESHES,
    gradient_difference,
    largest_difference,
    of_library,
    settings,
    train,
    train_and_reference,
)
from harness.oracle import write_documents
from harness.quick import rows
from harness.rope_spellings import SIZES
from titan_core.api import UserError
from titan_models_hf.config import HFArgs
from titan_models_hf.layout import define
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

QUICK = [
    "mixtral, one, documents", "qwen3, cp2, documents", "gemma2, pp2", "deepseek_v3, tp2", "qwen3_next, cp2, documents",
    "gpt_oss, ep2, documents",
]  # fmt: skip
FULL = [
    "gpt_oss, one, documents", "llama, tp2", "granite, tp2", "mixtral, fsdp2", "gemma3, cp2, documents", "gpt_oss, tp2",
    "falcon_h1, tp2 cp2, documents", "qwen3_moe, ep2", "phi3, tp2", "qwen3_next, tp2", "qwen3_next, pp2", "falcon_h1, pp2",
    "gemma2, cp2x2 by both, documents", "deepseek_v3, cp4 by heads", "mixtral, ep2 pp2", "olmoe, ep4",
    "deepseek_v3, ep2 tp2", "glm4_moe, ep2 tp2, documents", "gpt_oss, ep2 fsdp2",
]  # fmt: skip
EXPERTS = [
    f"{family}, {mesh}"
    for family in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe")
    for mesh in ("ep2", "ep4", "ep2 tp2", "ep2 cp2", "ep2 pp2")
]
LONG = [
    "glm4, tp2", "qwen3_next, fsdp2", "falcon_h1, tp2", "falcon_h1, cp2", "gpt_oss, cp2 by heads, documents", "olmo3, cp4",
    "qwen3_next, cp2x2 by both, documents", "qwen3_next, ep2 tp2, documents",
    *(cell for cell in EXPERTS if cell not in FULL),
]  # fmt: skip


@pytest.mark.parametrize("cell", rows([*QUICK, *FULL, *LONG], QUICK, FULL))
def test_equals_the_library(tmp_path: Path, gloo: GlooPool, cell: str) -> None:
    family, mesh, *documents = cell.split(", ")
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


def test_weights_of_files_need_no_initial_values(in_tmp: Path) -> None:
    """Of a family whose initial values Titan does not know."""
    torch.manual_seed(0)
    sizes = {**SIZES, "bos_token_id": 256, "eos_token_id": 257}
    apertus = transformers.ApertusForCausalLM(transformers.ApertusConfig(**sizes))
    apertus.save_pretrained("apertus")
    overrides = {
        "model.from_pretrained": "apertus", "model.tokenizer": "byte", "model.flavor": "", "model.args": "{}",
        "training.steps": 2, "job.device": "cpu",
    }  # fmt: skip
    record = run_recipe("hf_debug", overrides, weights=True)
    expected = dict(apertus.named_parameters())
    assert record.initial.keys() == expected.keys()
    for name, weight in record.initial.items():
        assert torch.equal(weight, expected[name].float()), name
    assert any(name.endswith("alpha_p") for name in expected)


def test_a_start_from_random_weights_is_refused(in_tmp: Path) -> None:
    args = 'architecture = "apertus", config = {vocab_size = 288, hidden_size = 64, intermediate_size = 96, '
    args += "num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, pad_token_id = 0}"
    overrides = {"model.flavor": "", "model.args": f"{{{args}}}", "job.device": "cpu"}
    with pytest.raises(UserError, match=r"act_fn\.alpha_p' *: has no initial value: the library draws it neither"):
        run_recipe("hf_debug", overrides)
