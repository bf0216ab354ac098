"""A family whose initial values Titan does not know trains from its files, and is refused only where one must be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from harness.jobs import run_recipe
from harness.rope_spellings import SIZES
from titan_core.api import UserError


@pytest.fixture
def apertus(in_tmp: Path) -> transformers.ApertusForCausalLM:
    torch.manual_seed(0)
    sizes = {**SIZES, "bos_token_id": 256, "eos_token_id": 257}
    model = transformers.ApertusForCausalLM(transformers.ApertusConfig(**sizes))
    model.save_pretrained("apertus")
    return model


def test_weights_of_files_need_no_initial_values(apertus: transformers.ApertusForCausalLM) -> None:
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
