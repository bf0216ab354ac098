"""Names, arrangements and config files of the library, in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.hf_families import FAMILIES, config_of, library_model, of_library
from titan_core.api import ForeignTensor
from titan_models_hf.config import HFArgs
from titan_models_hf.formats import from_args, notes, tensors, to_args


def args(family: str, **more: Any) -> HFArgs:
    architecture, config = config_of(family, **more)
    return HFArgs(architecture=architecture, config=config)


def rebuilt(declared: ForeignTensor, files: dict[str, Tensor]) -> Tensor:
    """Return a parameter from the tensors of files, by the definition in ``ForeignTensor``'s docstring; several pieces with
    their rows one after another."""
    pieces = [files[name] for name in declared.names]
    pieces = [piece.transpose(-1, -2) if declared.transpose else piece for piece in pieces]
    if not declared.rows:
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    (piece,) = pieces
    assert len(piece) == declared.block
    return piece[list(declared.rows)]


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_saved_files(tmp_path: Path, family: str) -> None:
    from safetensors.torch import load_file

    model = library_model(family)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor))
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    declared = tensors(args(family))
    state = model.state_dict()
    assert {name for one in declared for name in one.names} == files.keys()
    found = of_library(family, {one.parameter: rebuilt(one, files) for one in declared})
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.reshape(state[name].shape), state[name]), name


def test_a_tied_head_is_a_copy() -> None:
    declared = {one.name: one for one in tensors(args("qwen3", tie_word_embeddings=True))}
    assert declared["lm_head.weight"].copy
    assert declared["lm_head.weight"].parameter == "model.embed_tokens.weight"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
def test_a_config_file_is_read_as_the_same_model(tmp_path: Path, family: str) -> None:
    model = library_model(family)
    model.config.save_pretrained(tmp_path)
    found = to_args(json.loads((tmp_path / "config.json").read_text()))
    assert to_args(json.loads(json.dumps(from_args(found)))) == found
    mine = {key: value for key, value in from_args(args(family)).items() if key in found.config}
    assert mine == found.config


def test_what_is_not_a_causal_decoder_is_refused() -> None:
    for config, why in (
        ({"model_type": "bert"}, "is not causal"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "causal language model is BertLMHeadModel"),
        ({"model_type": "nonsense"}, "has no causal language model"),
        ({"model_type": "qwen3_mo"}, "did you mean 'qwen3_moe'"),
        ({"model_type": "llama", "attention_dropout": 0.1, **config_of("llama")[1]}, "attention_dropout = 0.1 let it draw"),
        ({"model_type": "gemma3", "text_config": {}}, "several modalities"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **config_of("llama")[1]},
            "architectures is",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            to_args(config)


def test_keys_that_the_library_does_not_read_are_noted() -> None:
    assert notes({"model_type": "qwen3", "hidden_size": 64, "auto_map": {}, "max_window_layers": 28}) == []
    (note,) = notes({"model_type": "llama", "my_factor": 2.0})
    assert "my_factor" in note
