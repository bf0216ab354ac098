"""From a sharded folder that ``transformers`` wrote, through training on TP 2 x FSDP 2, back to a folder that it loads, and
both generate the same."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.hf_families import library_model
from titan_core.cli.main import main
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

QUICK = ["gemma3", "gpt_oss"]  # windows; experts, sinks
FULL = ["deepseek_v3", "qwen3_next"]  # latent attention, recurrences
LONG = ["qwen2", "falcon_h1", "phi3"]  # tied, two recurrences in a block, fused layers
TIED = {"gemma3", "qwen2"}
FAMILIES = [
    *QUICK,
    *(pytest.param(family, marks=pytest.mark.full) for family in FULL),
    *(pytest.param(family, marks=pytest.mark.long) for family in LONG),
]
VOCABULARY = 258  # of the byte tokenizer: Titan generates none of the rows beyond
PROMPT, NEW_TOKENS = "import ", 64
RECIPE = """
[model]
from_pretrained = "theirs"
tokenizer = "byte"
[training]
seq_len = 48
local_batch_size = 2
global_batch_size = 4
steps = 3
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 0
[checkpoint]
enable = true
[job]
device = "cpu"
dump_folder = "run"
"""
MESH = {"parallelism.tensor_parallel_degree": 2, "parallelism.data_parallel_shard_degree": 2}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, in_tmp: Path) -> Path:
    """A folder with the library's random model in shards, and a recipe that starts from it."""
    torch.manual_seed(5)
    model = library_model(request.param, tie_word_embeddings=request.param in TIED, vocab_size=VOCABULARY)
    model.save_pretrained("theirs", max_shard_size="40KB")
    assert len(list(Path("theirs").glob("model-*.safetensors"))) > 3
    Path("recipe.toml").write_text(RECIPE)
    return in_tmp


def train(folder: str) -> None:
    """Train, as a rank of the mesh."""
    os.chdir(folder)
    torch.set_num_threads(1)
    run_recipe("recipe.toml", MESH)


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(folder: str) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / "config.json").read_text()))


def test_an_untrained_export_has_the_same_bytes(folder: Path) -> None:
    assert main(["checkpoint", "convert", "theirs", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    theirs, back = tensors_of("theirs"), tensors_of("back")
    assert back.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert config_of("back") == config_of("theirs")


@pytest.mark.full
def test_a_trained_export_generates_what_titan_generates(folder: Path, gloo: GlooPool) -> None:
    from transformers import AutoModelForCausalLM

    gloo.run(4, train, str(folder))
    assert main(["checkpoint", "convert", "run", "exported"]) == 0
    model, report = AutoModelForCausalLM.from_pretrained(
        "exported", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    start = tensors_of("theirs")
    assert any(not torch.equal(tensor, start[name]) for name, tensor in tensors_of("exported").items())
    prompt = torch.tensor([[256, *PROMPT.encode()]])
    with torch.no_grad():
        ids = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = ids[0, prompt.shape[1] :].tolist()
    options = ["--max-new-tokens", str(NEW_TOKENS), "--temperature", "0", "--ignore-end"]
    for source in ("run", "exported"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            arguments = [source, "--prompt", PROMPT, "--json", "--job.device", "cpu", "--model.tokenizer", "byte"]
            assert main(["generate", *arguments, *options]) == 0
        assert json.loads(printed.getvalue())["tokens"] == expected, source
