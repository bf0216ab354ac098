"""Weights convert to Hugging Face's format and back, and from Meta's, in agreement with transformers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from harness.packed import write_packed
from titan_ckpt.foreign.arrangement import read, shape_in
from titan_ckpt.foreign.files import SafetensorsFiles
from titan_ckpt.format.catalogue import pick
from titan_ckpt.format.chunks import read_whole
from titan_core.api import UserError, hookimpl
from titan_core.cli.main import main
from titan_core.loop import training
from titan_models_llama.config import LlamaArgs, RopeScaling
from titan_models_llama.formats import hf_tensors, meta_tensors
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job, run_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 288, "max_seq_len": 256}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings(tied: bool, scaled: bool) -> dict[str, object]:
    args: dict[str, Any] = {**SIZE, "tie_embeddings": tied}
    if scaled:
        args["rope_scaling"] = SCALING
    return {
        "model.args": toml(args),
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.global_batch_size": 4,
        "training.steps": 2,
        "checkpoint.enable": "true",
        "job.device": "cpu",
    }


def titan(*arguments: str) -> tuple[int, str]:
    """Run a command in this process, and return its exit status and errors."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(arguments)
    return status, errors.getvalue()


def logits_of(overrides: dict[str, object], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the job's logits before its first step, and its first loss on one process."""
    seen: list[Tensor] = []

    class Look:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            with torch.no_grad():
                seen.append(run.parts[0].module(tokens))

        @hookimpl
        def titan_step_end(self, report: Any) -> None:
            seen.append(report.loss)

    training.train(make_job("llama3_debug", overrides), [Look()])
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("tied", "scaled"),
    [(False, False), pytest.param(False, True, marks=pytest.mark.full), pytest.param(True, True, marks=pytest.mark.full)],
)
def test_an_export_has_the_same_logits_in_transformers(in_tmp: Path, tied: bool, scaled: bool) -> None:
    from transformers import LlamaForCausalLM

    overrides = settings(tied, scaled)
    run_recipe("llama3_debug", overrides)
    result = titan("checkpoint", "convert", "outputs/llama3_debug", "exported")
    assert result == (0, "")
    theirs, report = LlamaForCausalLM.from_pretrained("exported", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(0, 288, (2, 64), generator=torch.Generator().manual_seed(1))
    begin = {
        **overrides,
        "checkpoint.initial_load_path": "outputs/llama3_debug/checkpoint/step-2",
        "job.dump_folder": "again",
    }
    ours, _ = logits_of(begin, tokens)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-5, atol=1e-5)


def train_in(folder: str, overrides: dict[str, object]) -> dict[str, Tensor]:
    os.chdir(folder)
    return run_recipe("llama3_debug", overrides, weights=True).final


@pytest.mark.full
def test_an_export_of_a_sharded_run_is_complete(gloo: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divided = {"parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 1, "training.global_batch_size": 4}
    final = gloo.run(4, train_in, str(tmp_path), {**settings(False, True), **divided})[0]
    monkeypatch.chdir(tmp_path)
    assert titan("checkpoint", "convert", "outputs/llama3_debug", "exported", "--dtype", "bfloat16") == (0, "")
    files = SafetensorsFiles(Path("exported"))
    tensors = hf_tensors(LlamaArgs(**SIZE, rope_scaling=RopeScaling(**SCALING)))  # type: ignore[arg-type]
    assert {one.name for one in tensors} == files.names()
    for one in tensors:
        ours = read(files, one, shape_in(files, one))
        assert torch.equal(ours, final[one.parameter].bfloat16()), one.name


def their_model(folder: str, tied: bool, shard_size: str = "5GB") -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 10_000.0}  # fmt: skip
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=288, max_position_embeddings=256, rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()


@pytest.mark.parametrize(
    ("tied", "shards"),
    [(False, "5GB"), pytest.param(True, "5GB", marks=pytest.mark.full), pytest.param(False, "60KB", marks=pytest.mark.full)],
)
def test_a_job_that_starts_from_a_transformers_model_has_its_logits(in_tmp: Path, tied: bool, shards: str) -> None:
    from transformers import LlamaForCausalLM

    theirs = their_model("theirs", tied, shards)
    assert (len(list(Path("theirs").glob("*.safetensors"))) > 1) == (shards == "60KB")
    tokens = torch.randint(0, 288, (2, 64), generator=torch.Generator().manual_seed(1))
    direct, _ = logits_of({**settings(tied, True), "checkpoint.initial_load_path": "theirs"}, tokens)
    with torch.no_grad():
        torch.testing.assert_close(direct, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    assert titan("checkpoint", "convert", "theirs", "ours")[0] == 0
    assert titan("checkpoint", "verify", "ours")[0] == 0
    again = {**settings(tied, True), "checkpoint.initial_load_path": "ours", "job.dump_folder": "again"}
    converted, _ = logits_of(again, tokens)
    assert torch.equal(converted, direct)
    # The way back gives identical tensors.
    assert titan("checkpoint", "convert", "ours", "back")[0] == 0
    back = LlamaForCausalLM.from_pretrained("back", dtype=torch.float32).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())


def first_loss(folder: str, recipe: str, overrides: dict[str, object]) -> tuple[float, int]:
    """Return the first loss, and the number of elements that this rank read from files."""
    os.chdir(folder)
    sizes = []
    original = SafetensorsFiles.read

    def counted(self: Any, name: str, box: Any, split: Any = None) -> Tensor:
        part = original(self, name, box, split)
        sizes.append(part.numel())
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsFiles, "read", counted)
        return run_recipe(recipe, overrides).losses[0], sum(sizes)


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        pytest.param(4, {}, marks=pytest.mark.full),
        (2, {"parallelism.tensor_parallel_degree": 2}),
        pytest.param(2, {"parallelism.pipeline_parallel_degree": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_each_rank_reads_its_share_of_foreign_weights(gloo: GlooPool, tmp_path: Path, ranks: int, mesh: Any) -> None:
    model = their_model(str(tmp_path / "theirs"), tied=False)
    overrides = {**settings(False, True), "checkpoint.initial_load_path": "theirs", "training.local_batch_size": 1}

    def losses(ranks: int, **more: object) -> list[tuple[float, int]]:
        return gloo.run(ranks, first_loss, str(tmp_path), "llama3_debug", {**overrides, **more})

    ((loss, _),) = losses(1, **{"job.dump_folder": "one"})
    whole = sum(parameter.numel() for parameter in model.parameters())
    for other, elements in losses(ranks, **mesh, **{"job.dump_folder": "many"}):
        assert other == pytest.approx(loss, rel=1e-5)
        assert elements < 0.75 * whole


def meta_files(folder: Path, model: PreTrainedModel, files: int) -> None:
    """Write the weights as Meta publishes them: rows in Meta's order, divided over files."""
    folder.mkdir()
    args = LlamaArgs(**SIZE, rope_theta=10_000.0, rope_scaling=RopeScaling(**SCALING))  # type: ignore[arg-type]
    model.save_pretrained(folder / "hf")
    source = SafetensorsFiles(folder / "hf")
    whole = {one.parameter: read(source, one, shape_in(source, one)) for one in hf_tensors(args)}
    for number in range(files):
        shard = {
            one.name: whole[one.parameter]
            if one.split is None
            else whole[one.parameter].chunk(files, one.split)[number].clone()
            for one in meta_tensors(args)
        }
        torch.save({**shard, "rope.freqs": torch.zeros(8)}, folder / f"consolidated.{number:02d}.pth")
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 288, "multiple_of": 32,
              "ffn_dim_multiplier": 0.5, "norm_eps": 1e-5, "rope_theta": 10_000.0}  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))


@pytest.mark.parametrize("files", [1, 2])
def test_metas_files_become_a_checkpoint(in_tmp: Path, files: int) -> None:
    model = their_model("theirs", tied=False)
    meta_files(Path("meta"), model, files)
    result = titan("checkpoint", "convert", "meta", "ours")
    assert result == (0, "")
    assert titan("checkpoint", "convert", "theirs", "same")[0] == 0
    for name in ("tok_embeddings.weight", "layers.1.attention.wk.weight", "layers.0.attention.wo.weight", "output.weight"):
        tensors = []
        for folder in ("ours", "same"):
            found = pick(folder, None)
            assert found.manifest is not None
            tensors.append(read_whole(found.folder, found.manifest, f"model.{name}"))
        assert torch.equal(*tensors), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "llama3: model_type is \"mistral\", not 'llama'"),
        ({"attention_bias": True}, r"self_attn.q_proj.bias is missing"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
        ({"vocab_size": 300}, r"model.embed_tokens.weight has shape \[288, 64\], but the model requires \[300, 64\]"),
    ],
    ids=str,
)
def test_weights_of_another_model_are_refused(in_tmp: Path, change: dict[str, Any], message: str) -> None:
    their_model("theirs", tied=False)
    config = json.loads(Path("theirs/config.json").read_text())
    Path("theirs/config.json").write_text(json.dumps(config | change))
    result = titan("checkpoint", "convert", "theirs", "ours")
    assert result[0] == 2
    assert re.search(message, result[1]), result[1]
    assert not Path("ours").exists()


def test_another_rope_than_the_jobs_is_refused(in_tmp: Path) -> None:
    their_model("theirs", tied=False)
    with pytest.raises(
        UserError, match=r"rope_scaling is .* in its config.json and None in this job; set model.flavor and model.args"
    ):
        run_recipe("llama3_debug", {**settings(False, False), "checkpoint.initial_load_path": "theirs"})


def test_bad_folders_are_reported(in_tmp: Path) -> None:
    assert "there are no checkpoints here" in titan("checkpoint", "convert", "nowhere", "x")[1]
    Path("full").mkdir()
    Path("full/file").touch()
    assert "already exists and is not empty" in titan("checkpoint", "convert", "nowhere", "full")[1]
    their_model("theirs", tied=False, shard_size="60KB")
    next(Path("theirs").glob("*.safetensors")).unlink()
    assert "is missing, but the index lists it" in titan("checkpoint", "convert", "theirs", "x")[1]
    assert not list(Path().glob("x*"))


PACKED: dict[str, object] = {
    "model.name": "packed",
    "model.flavor": "tiny",
    "training.steps": 1,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "job.device": "cpu",
    "checkpoint.enable": "true",
}


@pytest.mark.parametrize("mesh", [{}, {"parallelism.tensor_parallel_degree": 2}], ids=["fsdp", "tp"])
def test_each_rank_reads_its_part_of_packed_weights(gloo: GlooPool, tmp_path: Path, mesh: dict[str, object]) -> None:
    whole = sum(tensor.numel() for tensor in write_packed(tmp_path / "theirs").values())
    assert main(["checkpoint", "convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0

    def losses(ranks: int, start: str, folder: str, **more: object) -> list[tuple[float, int]]:
        overrides = {**PACKED, "checkpoint.initial_load_path": start, "job.dump_folder": folder, **more}
        return gloo.run(ranks, first_loss, str(tmp_path), "tiny", overrides)

    ((loss, elements),), ((own, _),) = losses(1, "theirs", "one"), losses(1, "ours", "own")
    assert loss == own and elements == whole
    for other, of_rank in losses(2, "theirs", "two", **mesh):
        assert other == pytest.approx(loss, rel=1e-6)
        assert of_rank < (0.6 if not mesh else 0.95) * whole
