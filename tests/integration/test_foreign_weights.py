"""Foreign weights are loaded completely and exactly, or refused by name. Exports are usable."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fuzz.hf_folders import CONFIG, FILES, INDEX, TOKENIZER, make_folder
from titan_ckpt.foreign.checks import declared_tensors, require_equal_copies, require_weights
from titan_ckpt.foreign.exporting import to_hf
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest, write_manifest
from titan_core.api import ForeignTensor, Model, UserError
from titan_core.cli.main import main
from titan_core.plugins.registry import Components
from titan_models_llama.config import LlamaArgs
from titan_models_llama.formats import hf_args, hf_tensors
from titan_testing.jobs import run_recipe

RUN: dict[str, object] = {
    "training.seq_len": 16,
    "training.local_batch_size": 1,
    "training.steps": 1,
    "checkpoint.enable": "true",
    "job.device": "cpu",
}


@pytest.fixture
def theirs(in_tmp: Path) -> Path:
    make_folder(in_tmp / "theirs")
    return in_tmp / "theirs"


def model_args(folder: Path) -> str:
    """Return the arguments of the model in ``folder`` as a value of ``model.args``."""
    args = hf_args(json.loads((folder / CONFIG).read_text())).model_dump(exclude_none=True)
    scaling = ", ".join(f"{key} = {value}" for key, value in args.pop("rope_scaling").items())
    rest = ", ".join(f"{key} = {str(value).lower()}" for key, value in args.items())
    return f"{{{rest}, rope_scaling = {{{scaling}}}}}"


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a file, and update the index."""
    tensors = load_file(folder / FILES[0])
    edit(tensors)
    save_file(tensors, folder / FILES[0])
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != FILES[0]}
    index["weight_map"] |= dict.fromkeys(tensors, FILES[0])
    (folder / INDEX).write_text(json.dumps(index))


def convert(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["checkpoint", "convert", *arguments])
    return status, capsys.readouterr().err


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """Return why the folder is not converted."""
    status, errors = convert("theirs", "ours", capsys=capsys)
    assert status == 2
    return errors


HEAD = "model.embed_tokens.weight"
EDITS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    **{
        str(dtype): (lambda tensors, dtype=dtype: tensors.update({HEAD: tensors[HEAD].to(dtype)}), f"{HEAD} is stored as")  # type: ignore[misc]
        for dtype in (
            torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
            torch.bool, torch.complex64,
        )
    },
    "a bias": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}),
        "q_proj.bias does not belong to the model",
    ),
    "a layer": (
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(24, 16)}),
        "model.layers.2.mlp.up_proj.weight does not belong to the model",
    ),
    "scales": (lambda tensors: tensors.update({f"{HEAD}_scale_inv": torch.ones(1)}), f"{HEAD}_scale_inv does not belong"),
}  # fmt: skip


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("edit", EDITS)
def test_a_tensor_that_the_model_lacks_is_refused(theirs: Path, edit: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = EDITS[edit]
    args = model_args(theirs)
    change(theirs, make)
    assert message in refusal(capsys)
    if edit in ("a bias", "torch.int8", "torch.complex64"):
        with pytest.raises(UserError, match=re.escape(message)):
            run_recipe("llama3_debug", {**RUN, "model.args": args, "checkpoint.initial_load_path": "theirs"})


def test_a_known_extra_table_is_accepted(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(theirs, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert convert("theirs", "ours", capsys=capsys)[0] == 0


def test_types_more_precise_than_the_models_are_refused_unless_converted(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(theirs, lambda tensors: tensors.update({HEAD: tensors[HEAD].double()}))
    start = {**RUN, "model.args": model_args(theirs), "checkpoint.initial_load_path": "theirs"}
    with pytest.raises(UserError, match=r"embed_tokens.weight is float64, which does not convert to float32 without loss"):
        run_recipe("llama3_debug", start)
    assert convert("theirs", "ours", capsys=capsys)[0] == 0
    with pytest.raises(UserError, match=r"tok_embeddings.weight is float64 in the checkpoint and float32 in this job"):
        run_recipe("llama3_debug", {**start, "checkpoint.initial_load_path": "ours"})
    assert convert("theirs", "rounded", "--dtype", "float32", capsys=capsys)[0] == 0
    assert len(run_recipe("llama3_debug", {**start, "checkpoint.initial_load_path": "rounded"}).losses) == 1


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantised_model_is_refused(theirs: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((theirs / CONFIG).read_text())
    (theirs / CONFIG).write_text(json.dumps({**config, key: {"quant_method": "fp8"}}))
    assert f"these weights are quantised according to {key} (fp8)" in refusal(capsys)


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_head_must_equal_the_tied_embedding(theirs: Path, same: bool, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((theirs / CONFIG).read_text())
    (theirs / CONFIG).write_text(json.dumps({**config, "tie_word_embeddings": True}))
    if same:
        change(theirs, lambda tensors: tensors.update({"lm_head.weight": tensors[HEAD].clone()}))
    status, errors = convert("theirs", "ours", capsys=capsys)
    assert status == (0 if same else 2)
    assert same or "lm_head.weight differs from model.embed_tokens.weight" in errors


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin"])
def test_a_path_in_the_index_outside_the_folder_is_refused(
    theirs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index = json.loads((theirs / INDEX).read_text())
    index["weight_map"][HEAD] = name
    (theirs / INDEX).write_text(json.dumps(index))
    assert "which is not a .safetensors file in its folder" in refusal(capsys)


def test_files_that_the_index_does_not_name_are_reported(
    theirs: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    save_file(load_file(theirs / FILES[0]), theirs / "consolidated.safetensors")
    assert convert("theirs", "ours", capsys=capsys)[0] == 0
    assert "consolidated.safetensors is not read, because " in caplog.text


def test_a_tensor_in_two_files_is_refused(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = load_file(theirs / FILES[1])
    save_file({**load_file(theirs / FILES[0]), **dict(list(other.items())[:1])}, theirs / FILES[0])
    (theirs / INDEX).unlink()
    assert re.search(r"contains tensor .* which model-00001-of-00002.safetensors contains too", refusal(capsys))


def twice_by_name(args: LlamaArgs) -> list[ForeignTensor]:
    return [dataclasses.replace(one, name="weight") for one in hf_tensors(args)]


def twice_by_parameter(args: LlamaArgs) -> list[ForeignTensor]:
    return [dataclasses.replace(one, parameter="norm.weight") for one in hf_tensors(args)]


def one_too_few(args: LlamaArgs) -> list[ForeignTensor]:
    return hf_tensors(args)[:-1]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (twice_by_name, "'safetensors': the plugin declares weight twice"),
        (twice_by_parameter, "'safetensors': the plugin declares norm.weight twice"),
        (one_too_few, "format 'safetensors' declares no tensor for model.output.weight"),
    ],
)
def test_a_format_that_would_lose_tensors_is_refused(
    theirs: Path, tmp_path: Path, tensors: Callable[[LlamaArgs], list[ForeignTensor]], message: str
) -> None:
    assert main(["checkpoint", "convert", "theirs", "ours"]) == 0
    registry = Components.from_installed()
    model = registry.get(Model, "llama3")
    declared: Any = SimpleNamespace(call_list=lambda kind, args: tensors(args), origin=model.define.origin)
    form = dataclasses.replace(model.formats[0], tensors=declared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Components, "get", lambda self, kind, name: dataclasses.replace(model, formats=(form,)))
        (tmp_path / "back").mkdir()
        with pytest.raises(
            UserError, match=rf"plugin 'llama' \(titan-models-llama .*{message}.*(fix|add it to) its WeightFormat"
        ):
            to_hf("ours", tmp_path / "back", registry, None, None)


def test_meta_shards_must_agree(in_tmp: Path) -> None:
    from titan_ckpt.foreign.files import MetaFiles

    good = {"norm.weight": torch.ones(4), "rope.freqs": torch.ones(2)}
    others: list[tuple[Any, str]] = [
        ({"norm.weight": torch.ones(4)}, "tensor rope.freqs is missing here or in the first file"),
        ({**good, "more": torch.ones(1)}, "tensor more is missing here or in the first file"),
        ({**good, "norm.weight": torch.ones(5)}, "tensor norm.weight is missing .* or differs in shape or dtype"),
        ({**good, "norm.weight": torch.ones(4).int()}, "tensor norm.weight is missing .* or differs in shape or dtype"),
        ({**good, "step": 3}, "must contain only tensors by name"),
    ]
    torch.save(good, "consolidated.00.pth")
    for other, message in others:
        torch.save(other, "consolidated.01.pth")
        with pytest.raises(UserError, match=message):
            MetaFiles(in_tmp)
    torch.save({**good, "norm.weight": torch.zeros(4)}, "consolidated.01.pth")
    with pytest.raises(UserError, match=r"norm.weight: is replicated in all files, but differs between them"):
        MetaFiles(in_tmp).read("norm.weight", (slice(0, 4),))
    (in_tmp / "consolidated.01.pth").unlink()
    form = next(one for one in Components.from_installed().get(Model, "llama3").formats if one.files == "consolidated")
    files = MetaFiles(in_tmp)
    require_weights(files, [ForeignTensor("norm.weight", "n")], {"n": ((4,), None)}, form.ignored, "here")
    require_equal_copies(
        files, declared_tensors(form, LlamaArgs(dim=8, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=8), "m"), ""
    )
    with pytest.raises(UserError, match=r"norm.weight does not belong to the model"):
        require_weights(files, [], {}, form.ignored, "here")


def test_a_round_trip_keeps_the_config_the_generation_and_the_tokenizer(theirs: Path) -> None:
    config = json.loads((theirs / CONFIG).read_text())
    config |= {"eos_token_id": [1, 7], "pad_token_id": 5, "initializer_range": 0.02, "use_cache": True}
    (theirs / CONFIG).write_text(json.dumps(config))
    (theirs / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.6}))
    assert main(["checkpoint", "convert", "theirs", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    assert json.loads(Path("back", CONFIG).read_text()) == config
    for name in ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json"):
        assert json.loads(Path("back", name).read_text()) == json.loads((theirs / name).read_text())
    there = {**load_file(theirs / FILES[0]), **load_file(theirs / FILES[1])}
    back = load_file("back/model.safetensors")
    assert there.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in there.items())
    # A run that starts from these weights and changes the context length keeps the entries that are still true.
    longer = model_args(theirs).replace("max_seq_len = 64", "max_seq_len = 128")
    run_recipe(
        "llama3_debug", {**RUN, "model.args": longer, "checkpoint.initial_load_path": "theirs", "job.dump_folder": "run"}
    )
    assert main(["checkpoint", "convert", "run", "trained", "--dtype", "bfloat16"]) == 0
    trained = json.loads(Path("trained", CONFIG).read_text())
    assert trained["max_position_embeddings"] == 128
    assert trained["torch_dtype"] == "bfloat16"
    assert (trained["pad_token_id"], trained["initializer_range"]) == (5, 0.02)


@pytest.mark.parametrize("whole_folder", [True, False])
def test_an_export_stops_where_its_tokenizer_ends_a_text(
    theirs: Path, whole_folder: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run from scratch, with a tokenizer that is a folder or a single file with another name."""
    path = theirs
    if not whole_folder:
        path = Path("mine.json")
        path.write_bytes((theirs / TOKENIZER).read_bytes())
    args = re.sub(r"rope_scaling = {[^}]*}", "rope_theta = 9000.0", model_args(theirs).replace("rope_theta = 5000.0, ", ""))
    start = {**RUN, "model.args": args, "model.tokenizer": "hf", "model.tokenizer_path": str(path), "job.dump_folder": "run"}
    run_recipe("llama3_debug", start)
    capsys.readouterr()
    assert convert("run", "exported", capsys=capsys) == (0, "")
    tokenizer = AutoTokenizer.from_pretrained("exported")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
    model = AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, 1)
    assert model.generation_config.eos_token_id == 1
    with torch.no_grad():  # a model that always predicts the end of a text
        model.lm_head.weight.zero_()
        model.lm_head.weight[1] = 1.0
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.fill_(1.0)
    made = model.generate(torch.tensor([[0, 5]]), max_new_tokens=8, do_sample=False, pad_token_id=1)
    assert made.tolist() == [[0, 5, 1]]


def test_an_export_reports_a_missing_tokenizer(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own copy is in the checkpoint, unless the tokenizer's plugin reads files that only it knows."""
    tokenizer = {"model.tokenizer": "hf", "model.tokenizer_path": str(theirs), "job.dump_folder": "run"}
    run_recipe("llama3_debug", {**RUN, "model.args": model_args(theirs), **tokenizer})
    theirs.rename("elsewhere")
    capsys.readouterr()
    assert convert("run", "whole", capsys=capsys) == (0, "")
    (folder,) = Path("run/checkpoint").glob("step-*")
    manifest = read_manifest(Folder(str(folder)))
    write_manifest(Folder(str(folder)), dataclasses.replace(manifest, tokenizer={}))
    status, errors = convert("run", "exported", capsys=capsys)
    assert status == 0
    assert "exported without a tokenizer that transformers reads" in errors
    assert "`titan tokenizer download OWNER/NAME`" in errors
    status, errors = convert("run", "second", "--tokenizer", "nowhere", capsys=capsys)
    assert status == 2
    assert "there is no tokenizer here; pass a tokenizer.json" in errors
    assert "`titan tokenizer download OWNER/NAME`" in errors
    assert convert("run", "third", "--tokenizer", "elsewhere", capsys=capsys) == (0, "")
    assert Path("third/tokenizer_config.json").exists()
