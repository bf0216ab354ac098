"""From the name of a model on the hub to a model that has learned three chats, by the commands of the docs; and what is
printed about a model that Titan cannot train."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import fake_hub
from harness.chat_model import CHATS, save_tokenizer, write_chats
from harness.fake_hub import FakeHub
from harness.hf_families import library_model
from titan_core.api.config.toml import parse_toml
from titan_core.cli.main import main

NAME = "org/Qwen3-mini"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the model, as its owner uploads them."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = library_model("qwen3", vocab_size=272, initializer_range=0.05)
    model.save_pretrained(folder, max_shard_size="40KB")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def hub(saved: Path, monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    with fake_hub.running({NAME: files}) as hub:
        fake_hub.use(hub.url, monkeypatch)
        yield hub


def test_a_recipe_names_the_model_and_fits_its_context(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "copy", "--model", NAME]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"run `titan model download {NAME}`")
    assert main(["model", "download", NAME]) == 0
    assert f"recipe:     titan recipe copy --model assets/models/{NAME}" in capsys.readouterr().out
    assert main(["recipe", "copy", "--model", NAME]) == 0
    assert "next: set training.dataset_path to your chats" in capsys.readouterr().out
    written = Path("Qwen3-mini.toml").read_text()
    recipe = parse_toml(written)
    assert recipe["model"] == {"from_pretrained": NAME}
    assert recipe["training"]["dataset"] == "chat" and recipe["training"]["seq_len"] == 256
    assert "# Peak learning rate. [float, default " in written
    assert main(["recipe", "copy", "--model", NAME]) == 2
    assert "Qwen3-mini.toml: exists already; add --force" in capsys.readouterr().err
    assert main(["recipe", "copy", "--model", NAME, "mine.toml"]) == 0
    assert Path("mine.toml").read_text() == written
    write_chats(Path("chats.jsonl"), CHATS[:3])
    assert main(["config", "check", "mine.toml"]) == 0


@pytest.mark.full
def test_the_model_learns_three_chats(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "download", NAME]) == 0
    assert main(["recipe", "copy", "--model", NAME, "mine.toml"]) == 0
    write_chats(Path("chats.jsonl"), CHATS[:3])
    # Random weights learn only at a larger rate than trained ones.
    quick = ["--optimizer.lr", "3e-3", "--training.steps", "80", "--training.seq_len", "128", "--job.device", "cpu"]
    assert main(["train", "mine.toml", *quick]) == 0
    capsys.readouterr()
    for user, assistant in ((turn["content"] for turn in chat) for chat in CHATS[:3]):
        talk = ["--chat", "--prompt", user, "--temperature", "0", "--max-new-tokens", "30", "--json", "--job.device", "cpu"]
        assert main(["generate", "outputs/mine", *talk]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == assistant


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "typo": ({"model_type": "qwen33"}, "(did you mean 'qwen3'?)"),
    "encoder": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        'architectures is ["BertForMaskedLM"], and the library\'s causal language model is BertLMHeadModel',
    ),
    "dropout": (
        {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_dropout": 0.1},
        "(set attention_dropout = 0.0 in model.args.config)",
    ),
    "frequencies": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "(set rope_type of rope_parameters to another type (yarn, linear, default))",
    ),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "or dequantise it first"),
    "modalities": ({"model_type": "gemma3", "text_config": {}}, "is a model of several modalities"),
}
LACKING = {
    "config.json": "model/config.json: no such file; download it again",
    "tokenizer.json": "contain no tokenizer that Titan finds; put the tokenizer.json of the model beside its weights",
    "model-00002-*.safetensors": "is missing, but the index lists it",
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("case", [*CONFIGS, *LACKING])
def test_a_model_that_cannot_be_trained_is_one_line(
    saved: Path, in_tmp: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, "model")
    if case in CONFIGS:
        changes, message = CONFIGS[case]
        config = Path("model/config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    else:
        message = LACKING[case]
        next(Path("model").glob(case)).unlink()
    assert main(["recipe", "copy", "--model", "model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("titan: error: ") and message in line
    assert not Path("model.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere: does not exist; check the path"),
        (["--model", "modle"], "modle: does not exist; did you mean 'model'?"),
        (["--model", "model", "my"], "my: must end in .toml; write to my.toml"),
        (
            ["--model", "model", "llama3_debug", "my.toml"],
            "--model model: replaces the recipe llama3_debug; give one of them",
        ),
        ([], "recipe copy: needs the name of a recipe and a FILE, or --model"),
    ],
)
def test_mistakes(in_tmp: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    assert main(["recipe", "copy", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
