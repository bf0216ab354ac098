"""``model.from_pretrained``: a model starts from a folder that ``transformers`` wrote, without transcription. Differences
between the folder and the recipe are refused or listed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.chat_model import save_model
from harness.fake_cuda import FakeCuda
from titan_ckpt import stored_model
from titan_core.api import UserError
from titan_core.api.config.sections import ModelSection
from titan_core.cli.main import main
from titan_core.config.render import to_toml
from titan_core.job.assemble import model_args
from titan_models_llama.config import FLAVORS
from titan_models_llama.formats import hf_args, hf_config
from titan_testing.jobs import make_job, run_recipe

RECIPE = """
[model]
from_pretrained = "model"
[training]
seq_len = 32
local_batch_size = 2
steps = 2
max_norm = 0
[lr_scheduler]
warmup_steps = 0
[job]
device = "cpu"
dump_folder = "run"
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model(folder / "model")
    return folder


@pytest.fixture
def here(saved: Path, in_tmp: Path) -> Path:
    """A folder with the model and a recipe."""
    shutil.copytree(saved / "model", "model")
    Path("sft.toml").write_text(RECIPE)
    return in_tmp


@contextlib.contextmanager
def edited(file: str) -> Iterator[dict[str, Any]]:
    """Change a JSON file."""
    contents = json.loads(Path(file).read_text())
    yield contents
    Path(file).write_text(json.dumps(contents))


def test_everything_about_the_model_comes_from_the_folder(here: Path) -> None:
    job = make_job("sft.toml")
    section = job.config.section(ModelSection)
    assert (section.name, section.tokenizer, section.tokenizer_path) == ("llama3", "hf", "model")
    assert job.model_args == hf_args(json.loads(Path("model/config.json").read_text()))
    assert job.name == "llama3 model"


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("changes", [{"rope_scaling": None}, {"tie_embeddings": True}, {}], ids=str)
@pytest.mark.parametrize("size", ["1B", "debug"])
def test_a_published_size_is_recognised_and_any_size_survives_toml(here: Path, size: str, changes: dict[str, Any]) -> None:
    """TOML has no null, and a model without RoPE scaling must not get the default's."""
    args = FLAVORS[size].model_copy(update={"vocab_size": 288, **changes})
    with edited("model/config.json") as config:
        config.clear()
        config.update(hf_config(args))
    job = make_job("sft.toml")
    assert job.model_args == args
    assert job.config.section(ModelSection).flavor == (size if args == FLAVORS[size] else "")
    Path("resolved.toml").write_text(to_toml(job.config))
    again = make_job("resolved.toml")
    assert again.config.as_dict() == job.config.as_dict() and again.model_args == args
    Path("resolved.toml").write_text(to_toml(job.config).replace('from_pretrained = "model"\n', ""))
    assert make_job("resolved.toml").model_args == args


def test_none_stands_for_no_value_in_model_args(in_tmp: Path) -> None:
    job = make_job("llama3_debug", {"model.args.rope_scaling": "none", "model.flavor": "8B"})
    assert model_args(job.config, job.family).rope_scaling is None  # type: ignore[attr-defined]


def test_a_run_starts_from_the_weights_with_or_without_checkpoints(here: Path) -> None:
    model = LlamaForCausalLM.from_pretrained("model")
    for enable in ("false", "true"):
        record = run_recipe("sft.toml", {"checkpoint.enable": enable, "job.dump_folder": enable}, weights=True)
        assert torch.equal(record.initial["output.weight"], model.lm_head.weight)
        assert torch.equal(record.initial["layers.1.feed_forward.w2.weight"], model.model.layers[1].mlp.down_proj.weight)


@pytest.mark.full
def test_a_resumed_run_needs_no_weights(here: Path) -> None:
    """Also through the config that the run recorded."""
    changes = {"checkpoint.enable": "true", "model.tokenizer": "byte", "training.stop_at_step": 1}
    whole = run_recipe("sft.toml", {**changes, "training.stop_at_step": 2, "job.dump_folder": "whole"})
    first = run_recipe("sft.toml", changes)
    shutil.rmtree("model")
    resumed = run_recipe("run/config.toml", {"training.stop_at_step": 2})
    assert first.losses + resumed.losses == whole.losses
    assert any("does not exist. It is needed unless" in note for note in make_job("run/config.toml").notes)
    with pytest.raises(UserError, match=r"model: does not exist"):
        run_recipe("run/config.toml", {"job.dump_folder": "another"})


def test_a_run_can_start_from_another_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And its export keeps the files of the first folder."""
    first = run_recipe("sft.toml", {"checkpoint.enable": "true"}, weights=True)
    changes = {"model.from_pretrained": "run", "job.dump_folder": "second", "checkpoint.enable": "true"}
    second = run_recipe("sft.toml", changes, weights=True)
    assert all(torch.equal(second.initial[name], tensor) for name, tensor in first.final.items())
    assert main(["checkpoint", "convert", "second", "hf"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (Path("hf") / name).read_bytes() == (Path("model") / name).read_bytes()
    assert json.loads(Path("hf/generation_config.json").read_text())["do_sample"] is False


def test_longer_contexts_and_other_tokenizers_are_allowed_and_listed(here: Path) -> None:
    job = make_job("sft.toml", {"model.args.max_seq_len": 512, "training.seq_len": 512, "model.tokenizer": "byte"})
    notes = "\n".join(job.notes)
    assert 'model.tokenizer = "byte" replaces "hf", which is beside the weights' in notes
    assert "the model's context is 512 tokens; that of the weights is 256" in notes
    assert "vocabulary has 272 tokens, the tokenizer's 258" in notes
    assert job.model.layout.max_seq_len == 512


def test_a_flavor_and_arguments_that_agree_are_allowed(here: Path) -> None:
    make_job("sft.toml", {"model.args": "{dim = 32}", "model.name": "llama3"})
    with edited("model/config.json") as config:
        config.clear()
        config.update(hf_config(FLAVORS["debug"]))
    assert make_job("sft.toml", {"model.flavor": "debug"}).model_args == FLAVORS["debug"]


def test_differences_are_listed_everywhere(here: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    with edited("model/config.json") as config:
        config.update(attention_dropout=0.1, dtype="bfloat16", use_cache=True)
    with edited("model/generation_config.json") as generation:
        generation["eos_token_id"] = [258, 260]
    expected = [
        "attention_dropout is 0.1, but this model trains without dropout",
        "not used: dtype, initializer_range, pretraining_tp",
        "the weights are stored in bfloat16",
        "starts from the weights in model",
        "11 are unused",
        "ids that end generated text: 258, 260; ids that the tokenizer puts at the end of a document: [258]",
    ]
    for command in (["config", "check"], ["job", "show"], ["config", "check", "--json"], ["job", "show", "--json"]):
        assert main([*command, "sft.toml"]) == 0
        printed = capsys.readouterr().out
        assert all(line in printed for line in expected), command
    with caplog.at_level("INFO"):
        run_recipe("sft.toml", {"training.stop_at_step": 0})
    assert all(line in caplog.text for line in expected)


def test_every_setting_of_transformers_llama_is_known(here: Path) -> None:
    """Of this version: a setting that a later version adds is refused until somebody has looked at it."""
    hf_args(LlamaConfig().to_dict())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"model_type": "mistral"}, 'model_type is "mistral"'),
    "head": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    "bias": ({"attention_bias": True}, "attention_bias is true"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is true"),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    "head_dim": ({"head_dim": 64}, "head_dim is 64"),
    "window": ({"sliding_window": 4096}, "sliding_window is 4096"),
    "layer types": ({"layer_types": ["sliding_attention"]}, "layer_types is"),
    "remote code": ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    "linear rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type is "linear"'),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, 'rope_type is "yarn"'),
    "rope": ({"rope_parameters": {"rope_theta": 1e4, "mscale": 2.0}}, "rope_parameters.mscale is 2.0"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "anything": ({"residual_multiplier": 0.2}, "residual_multiplier is 0.2"),
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_the_model_lacks_are_refused(here: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with edited("model/config.json") as config:
        config.update(changes)
    with pytest.raises(UserError) as error:
        make_job("sft.toml", {"plugins.disable": '["models-hf"]'})  # which has them
    (problem,) = error.value.problems
    assert message in str(problem) and "from_pretrained" in problem.where


MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "missing folder": ({"model.from_pretrained": "nowhere"}, 'from_pretrained = "nowhere": does not exist; check the path'),
    "not downloaded": ({"model.from_pretrained": "org/name"}, "run `titan model download org/name`"),
    "empty folder": ({"model.from_pretrained": "empty"}, "empty"),
    "no config.json": ({"model.from_pretrained": "weights"}, "weights/config.json: no such file"),
    "no weights": ({"model.from_pretrained": "config"}, "no weights in safetensors format"),
    "no tokenizer": ({"model.from_pretrained": "bare"}, "no tokenizer that Titan finds; set model.tokenizer"),
    "flavor": (
        {"model.flavor": "8B"},
        'model.flavor = "8B": contradicts the weights in model, for which dim is 32 and not 4096',
    ),
    "argument": (
        {"model.args.n_layers": 3},
        "model.args.n_layers = 3: contradicts the weights in model, for which n_layers is 2",
    ),
    "nested": ({"model.args.rope_scaling.factor": 2.0}, "rope_scaling = {factor = 2.0}: contradicts the weights"),
    "model": ({"model.name": "other"}, "the weights in model are those of model 'llama3'"),
    "unknown flavor": ({"model.flavor": "9B"}, "has no such flavor"),
    "unknown argument": ({"model.args.width": 3}, "unknown key"),
    "no table": ({"model.args": 3}, "model.args = 3"),
    "long name": ({"model.from_pretrained": "x" * 300}, "must not contain a name longer than 255 bytes"),
    "context": ({"training.seq_len": 257}, "the model accepts at most 256 tokens"),
    "missing shard": ({"model.from_pretrained": "shards"}, "model-00002.safetensors: is missing, but the index lists it"),
    "two origins": ({"checkpoint.enable": "true", "checkpoint.initial_load_path": "model"}, "remove one of them"),
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line_each(here: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = MISTAKES[case]
    Path("empty").mkdir()
    for folder, names in {
        "weights": ["model.safetensors"],
        "config": ["config.json", "tokenizer.json"],
        "bare": ["config.json", "model.safetensors"],
        "shards": ["config.json", "model.safetensors", "tokenizer.json"],
    }.items():
        Path(folder).mkdir()
        for name in names:
            shutil.copy(Path("model") / name, folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    Path("shards/model.safetensors.index.json").write_text(json.dumps(index))
    arguments = [argument for key, value in changes.items() for argument in (f"--{key}", str(value))]
    assert main(["config", "check", "sft.toml", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("titan: error: ") and message in line


def test_the_folder_is_read_once_to_assemble_a_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    find = stored_model.find
    monkeypatch.setattr(stored_model, "find", lambda path, registry: (found.append(path), find(path, registry))[1])
    assert make_job("sft.toml").config.pretrained is not None
    assert found == ["model"]


def test_a_name_is_found_in_the_cache_of_the_hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    snapshot = Path("cache/models--org--name/snapshots/0123456789abcdef")
    snapshot.parent.mkdir(parents=True)
    shutil.move("model", snapshot)
    refs = Path("cache/models--org--name/refs")
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(Path("cache").resolve()))
    job = make_job("sft.toml", {"model.from_pretrained": "org/name"})
    assert Path(job.config.section(ModelSection).tokenizer_path or "") == snapshot.resolve()
    assert job.name == "llama3 name"


def test_a_recipe_is_checked_without_torch(here: Path) -> None:
    program = (
        "import sys\nfrom titan_core.__main__ import main\n"
        "sys.argv = ['titan', 'config', 'check', 'sft.toml']\nassert main() == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_simulation_reads_no_weights_and_saves_none(here: Path, fake_cuda: FakeCuda) -> None:
    file = here / "model" / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as opened:
        opened.truncate(8 + header + 1)
    settings = {"checkpoint.enable": "true", "checkpoint.folder": str(here / "checkpoints")}
    found = fake_cuda.train(str(here / "sft.toml"), {"model.from_pretrained": str(here / "model"), **settings}, strict=False)
    assert found.peak.bytes > 0
    assert not (here / "checkpoints").exists()
