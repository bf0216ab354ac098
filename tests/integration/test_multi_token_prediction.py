"""Multi-token prediction on meshes: losses, gradients, metrics and counts of experts are those of one device.

``uv run pytest -m "" tests/integration/test_multi_token_prediction.py`` runs all rows of the table."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.quick import rows
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_recipe
from titan_testing.meshes import CP, FAST, PP, SCHEDULE, TP, require_equal, run_in

EP, AC, LOCAL = "parallelism.expert_parallel_degree", "activation_checkpoint.mode", "training.local_batch_size"
NO_SP, NO_LOSS = (f"parallelism.disable_{name}_parallel" for name in ("sequence", "loss"))
CHUNKS, SPLIT = {"objective.chunk_tokens": 24}, "parallelism.pipeline_parallel_split_points"
ARGS = "dim = 48, n_heads = 4, n_kv_heads = 2, ffn_dim = 100"
SETTINGS: dict[str, object] = {
    **FAST, "training.steps": 2, "training.global_batch_size": 4, "validation.enable": "true",
    "validation.dataset": "stdlib", "validation.freq": 2, "validation.steps": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "experts": (
        "qwen3_moe_tiny",
        {"model.args": f"{{{ARGS}, n_layers = 3, n_mtp_layers = 1, n_experts = 4, expert_dim = 32}}"},
    ),
    "dense, tied, documents": (
        "qwen3_debug",
        {"model.args": f"{{{ARGS}, n_layers = 2, n_mtp_layers = 2, tie_embeddings = true}}", "data.document_mask": "true"},
    ),
}  # fmt: skip
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "accumulation 4, chunks": (1, {LOCAL: 1, **CHUNKS}),
    "FSDP 2": (2, {}),
    "FSDP 2, recomputed, chunks": (2, {AC: "full", **CHUNKS}),
    "TP 2": (2, {TP: 2}),
    "TP 2, no SP, chunks": (2, {TP: 2, NO_SP: "true", **CHUNKS}),
    "TP 2, no loss parallelism": (2, {TP: 2, NO_LOSS: "true"}),
    "PP 2, 1F1B": (2, {PP: 2, LOCAL: 4}),
    "PP 2, cut before the last block": (2, {PP: 2, LOCAL: 4, SPLIT: '["layers.3"]'}),
    "PP 2, ZBVZeroBubble, recomputed": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", AC: "selective", LOCAL: 4}),
    "CP 2": (2, {CP: 2}),
    "EP 2": (2, {EP: 2}),
    "TP 2, CP 2": (4, {TP: 2, CP: 2}),
    "TP 2, PP 2": (4, {TP: 2, PP: 2, LOCAL: 4}),
    "PP 2, CP 2": (4, {PP: 2, CP: 2, LOCAL: 4}),
    "EP 2, FSDP 2": (4, {EP: 2, LOCAL: 1}),
    "EP 2 = TP 2, PP 2": (4, {EP: 2, TP: 2, PP: 2, LOCAL: 4}),
}  # fmt: skip
QUICK = ("accumulation 4, chunks", "CP 2")
FULL = tuple(name for name, (ranks, _) in MESHES.items() if ranks < 4)

Reference = Callable[[str], RunRecord]


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The record of one device, by model."""

    @functools.cache
    def trained(model: str) -> RunRecord:
        recipe, overrides = MODELS[model]
        folder = str(tmp_path_factory.mktemp("one"))
        return gloo.run(1, run_in, folder, {**SETTINGS, LOCAL: 4, **overrides}, True, recipe)[0]

    return trained


@pytest.mark.parametrize("model", ["experts", pytest.param("dense, tied, documents", marks=pytest.mark.full)])
@pytest.mark.parametrize("mesh", rows(MESHES, QUICK, FULL))
def test_a_mesh_trains_as_one_device(gloo: GlooPool, one_device: Reference, tmp_path: Path, mesh: str, model: str) -> None:
    ranks, of_mesh = MESHES[mesh]
    if EP in of_mesh and model != "experts":
        pytest.skip("has no experts")
    recipe, overrides = MODELS[model]
    records = gloo.run(ranks, run_in, str(tmp_path), {**SETTINGS, **overrides, **of_mesh}, True, recipe)
    require_equal(records, one_device(model))


@pytest.fixture
def trained(in_tmp: Path) -> Path:
    """A trained model with one depth, and its files."""
    recipe, overrides = MODELS["experts"]
    settings = {**overrides, "checkpoint.enable": "true", "job.dump_folder": "run", "training.steps": 1, "job.device": "cpu"}
    run_recipe(recipe, {**FAST, **settings})
    assert main(["checkpoint", "convert", "run", "files"]) == 0
    return in_tmp


@pytest.mark.full
def test_files_keep_or_drop_the_blocks(trained: Path) -> None:
    """Both ways, by the names of DeepSeek-V3; transformers reads them without the blocks."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    whole = load_file("files/model.safetensors")
    config = json.loads(Path("files/config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (3, 1)
    assert {"model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.3.up_proj.weight"} < whole.keys()
    # Published files repeat what the blocks share with the model.
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    repeated = {f"model.layers.3.{name}.weight": whole[original].clone() for name, original in copies.items()}
    save_file(whole | repeated, "files/model.safetensors", metadata={"format": "pt"})
    assert main(["checkpoint", "convert", "files", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    back = load_file("back/model.safetensors")
    assert back.keys() == whole.keys() and all(torch.equal(back[name], tensor) for name, tensor in whole.items())
    assert main(["checkpoint", "convert", "ours", "less", "--inference"]) == 0
    less = load_file("less/model.safetensors")
    assert less.keys() == {name for name in whole if not name.startswith("model.layers.3.")}
    assert "num_nextn_predict_layers" not in json.loads(Path("less/config.json").read_text())
    theirs = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in ("back", "less"))
    for (name, one), other in zip(next(theirs).items(), next(theirs).values(), strict=True):
        assert torch.equal(one, other), name
    assert main(["checkpoint", "convert", "less", "small"]) == 0
    assert main(["checkpoint", "convert", "small", "never", "--inference"]) == 2
    save_file(whole | {name: tensor + 1 for name, tensor in repeated.items()}, "files/model.safetensors")
    assert main(["checkpoint", "convert", "files", "other"]) == 2


@pytest.mark.parametrize("start", ["run", pytest.param("files", marks=pytest.mark.full)])
def test_a_job_without_depths_drops_the_blocks_of_its_weights(trained: Path, start: str) -> None:
    settings = {**FAST, "training.steps": 1, "job.device": "cpu", "model.from_pretrained": start, "model.tokenizer": "byte"}
    Path("start.toml").write_text("")
    kept = run_recipe("start.toml", {**settings, "model.args": "{}", "job.dump_folder": "kept"}, weights=True)
    dropped = {**settings, "model.args": "{n_mtp_layers = 0}", "job.dump_folder": "dropped"}
    record = run_recipe("start.toml", dropped, weights=True)
    assert record.metrics == [{}] and kept.metrics[0]["main_loss"] == pytest.approx(record.losses[0], rel=1e-6)
    blocks = {name for name in kept.initial if name.startswith(("layers.3.", "norm.mtp."))}
    assert blocks and record.initial.keys() == kept.initial.keys() - blocks
    assert all(torch.equal(tensor, kept.initial[name]) for name, tensor in record.initial.items())
    with pytest.raises(UserError, match="n_mtp_layers is 1 and not 2"):
        make_job("start.toml", {**settings, "model.args": "{n_mtp_layers = 2}"})


def test_generation_is_without_the_blocks(
    trained: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They would take memory, and keep no keys and values."""
    texts, slow = [], []
    for depths in ([], ["--model.args.n_mtp_layers", "0"], ["--model.args.n_mtp_layers", "1"]):
        capsys.readouterr(), caplog.clear()
        options = ["--prompt", "def", "--max-new-tokens", "8", "--temperature", "0", "--job.device", "cpu", *depths]
        assert main(["generate", "run", *options]) == 0
        texts.append(capsys.readouterr().out)
        slow.append("every token computes the whole sequence again" in caplog.text)
    assert texts[0] == texts[1] == texts[2]
    assert slow == [False, False, True]
