"""GPT-2 as an example of a third party: its files are those of transformers, whose logits the suite compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from titan_core.cli.main import main

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture
def package(site_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site_of("titan-model-gpt2"))


def their_model(tied: bool = True, **config: Any) -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 288, "n_positions": 64, "tie_word_embeddings": tied}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager", **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_files_without_a_prefix_and_with_masks_are_read_and_written_as_transformers_does(in_tmp: Path, tied: bool) -> None:
    """As OpenAI's published weights are."""
    from safetensors.torch import load_file, save_file

    their_model(tied).save_pretrained("new")
    their_model(tied).save_pretrained("old")
    tensors = {name.removeprefix("transformer."): one for name, one in load_file("new/model.safetensors").items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, "old/model.safetensors", {"format": "pt"})
    assert main(["checkpoint", "convert", "old", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    assert Path("back/model.safetensors").read_bytes() == Path("new/model.safetensors").read_bytes()
    config, back = (json.loads(Path(folder, "config.json").read_text()) for folder in ("new", "back"))
    assert all(back[key] == config[key] for key in ("n_embd", "n_layer", "n_head", "n_positions", "tie_word_embeddings"))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, and this model supports only"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0, and this model does not know what that means"),
    ],
    ids=str,
)
def test_another_model_is_refused(in_tmp: Path, change: Any, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    their_model().save_pretrained("theirs")
    config = json.loads(Path("theirs/config.json").read_text())
    Path("theirs/config.json").write_text(json.dumps({**config, **change}))
    assert main(["checkpoint", "convert", "theirs", "ours"]) == 2
    assert message in capfd.readouterr().err
