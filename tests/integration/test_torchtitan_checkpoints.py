"""TorchTitan's checkpoints of Llama are imported under the names that its versions use."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from titan_ckpt.format.chunks import read_whole
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest
from titan_core.cli.main import main
from titan_models_llama.config import LlamaArgs
from titan_models_llama.layout import define

RECIPE = """
[model]
name = "llama3"
flavor = "debug"
tokenizer = "hf"
tokenizer_path = "nowhere/tokenizer.json"
args = {dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 48, tie_embeddings = %s}

[training]
dataset = "json"
dataset_path = "nowhere"
"""
SIZES: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "vocab_size": 288}


def weights(tied: bool) -> dict[str, Tensor]:
    """Random weights under Titan's names."""
    model = define(LlamaArgs(**SIZES, rope_scaling=None, tie_embeddings=tied)).build()
    return {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}


def convert(state: dict[str, Any], *options: str, tied: bool = False) -> tuple[int, str]:
    """Save ``state`` with DCP and convert it. Return the exit status and errors."""
    Path("recipe.toml").write_text(RECIPE % str(tied).lower())
    with warnings.catch_warnings(action="ignore"):
        save(state, storage_writer=FileSystemWriter("source"))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(["checkpoint", "convert", "source", "titan", "--allow-pickle", "--recipe", "recipe.toml", *options])
    return status, errors.getvalue()


def require_imported(state: dict[str, Tensor]) -> None:
    manifest = read_manifest(Folder("titan"))
    assert manifest.tensors.keys() == {f"model.{name}" for name in state}
    for name, tensor in state.items():
        assert torch.equal(read_whole(Folder("titan"), manifest, f"model.{name}"), tensor), name
    assert manifest.about["config"]["model"]["tokenizer_path"] == "nowhere/tokenizer.json"


def newer_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("attention.w", "attention.qkv_linear.w") if "attention.wo" not in name else name: tensor
        for name, tensor in state.items()
    }


def test_names_of_each_version(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = weights(tied=False)
    renamed = newer_names(state)
    assert len(renamed.keys() - state.keys()) == 6
    assert convert({"model": {**renamed, "freqs_cis": torch.zeros(4, 2, dtype=torch.complex64)}}) == (0, "")
    assert capsys.readouterr().out == "wrote titan\nnot imported: model.freqs_cis\n"
    require_imported(state)
    with warnings.catch_warnings(action="ignore"):
        assert main(["checkpoint", "convert", "titan", "exported", "--to", "dcp"]) == 0
        dcp_to_torch_save("exported", "exported.pt")
    exported = torch.load("exported.pt", weights_only=True)
    assert exported.keys() == state.keys() and all(torch.equal(exported[name], state[name]) for name in state)


def test_a_tied_output_may_be_stored_and_must_be_the_same(in_tmp: Path) -> None:
    state = weights(tied=True)
    assert "output.weight" not in state
    output = state["tok_embeddings.weight"].clone()
    assert convert({**state, "output.weight": output}, tied=True) == (0, "")
    require_imported(state)


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {name: tensor for name, tensor in state.items() if ".attention.w" not in name or "wo" in name}
    return {**kept, "layers.0.attention.qkv_linear.wqkv.weight": torch.zeros(64, 32)}


REFUSED: dict[str, tuple[bool, Callable[[dict[str, Tensor]], dict[str, Tensor]], tuple[str, ...], str]] = {
    "another output": (
        True,
        lambda state: {**state, "output.weight": torch.zeros(288, 32)},
        (),
        "output.weight differs from tok_embeddings.weight",
    ),
    "two names": (
        False,
        lambda state: {**state, **newer_names(state)},
        (),
        "contains both layers.0.attention.wq.weight and layers.0.attention.qkv_linear.wq.weight, two names of",
    ),
    "fused projections": (False, fused, (), "layers.0.attention.wq.weight is missing"),
    "another number of layers": (
        False,
        lambda state: state,
        ("--model.args.n_layers", "1"),
        "layers.1.attention.wq.weight does not belong to the model",
    ),
}
"""Whether the embedding is tied, the change of the weights, options, and the error."""


@pytest.mark.parametrize("case", REFUSED)
def test_weights_of_another_model_are_refused(in_tmp: Path, case: str) -> None:
    tied, change, options, says = REFUSED[case]
    status, errors = convert(change(weights(tied)), *options, tied=tied)
    assert status == 2 and says in errors
