"""Folders of weights that Titan cannot use are refused by what they are, and no error says how to run code in them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from titan_ckpt.foreign.config import kind_of
from titan_ckpt.foreign.files import MetaFiles
from titan_core.api import UserError


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_is_no_model(name: str, tmp_path: Path) -> None:
    """As PEFT saves one."""
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, tmp_path / name)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/b", "peft_type": "LORA"}))
    with pytest.raises(UserError, match=r'contains an adapter \(PEFT\) of the model "a/b", and not the weights of a model'):
        kind_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")  # a model that has an adapter beside it
    assert kind_of(tmp_path) == "safetensors"


def test_no_error_says_how_to_run_code(tmp_path: Path) -> None:
    """Torch's message names the functions that would."""
    torch.save({"w": Fraction(1, 2)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UserError) as caught:
        MetaFiles(tmp_path)
    (problem,) = caught.value.problems
    assert problem.why == "is damaged, or contains other objects than tensors, which could run code"
    assert problem.fix == "download it again, or convert it to safetensors"
