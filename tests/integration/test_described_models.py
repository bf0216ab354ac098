"""Models of which only a config file is there, and recipes that are in no file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import fake_hub
from harness.fake_hub import FakeHub
from titan_core.api import Config, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import ModelSection, TrainingSection
from titan_core.cli.invocation import Invocation
from titan_core.plugins.registry import Components

NAME = "org/Qwen3-mini"
FILE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 288, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def invocation(overrides: tuple[Override, ...] = ()) -> Invocation:
    return Invocation(argparse.Namespace(recipe=None), Components.from_installed(), overrides)


def described(name: str) -> Mapping[str, Mapping[str, Any]]:
    return invocation().models.describe(name)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> Iterator[FakeHub]:
    with fake_hub.running({NAME: {"config.json": json.dumps(FILE).encode()}, "org/Empty": {"README.md": b""}}) as hub:
        fake_hub.use(hub.url, monkeypatch)
        yield hub


def test_a_folder_with_a_config_file_describes_a_model(in_tmp: Path) -> None:
    Path("config.json").write_text(json.dumps(FILE | {"quantization_config": {"quant_method": "fp8"}}))
    model = described(".")["model"]
    assert (model["name"], model["flavor"]) == ("qwen3", "")
    assert (model["args"]["dim"], model["args"]["n_layers"], model["args"]["vocab_size"]) == (64, 2, 288)
    assert "tokenizer" not in model
    Path("tokenizer.json").write_text("{}")
    assert described(".")["model"]["tokenizer_path"] == "."


def test_the_hub_sends_the_config_file_and_no_weights(hub: FakeHub) -> None:
    assert described(NAME)["model"]["args"]["dim"] == 64
    assert [one.path.rpartition("/")[2] for one in hub.requests if "/resolve/" in one.path and one.method == "GET"] == [
        "config.json"
    ]
    assert list(Path().iterdir()) == []


def test_a_model_that_this_machine_has_needs_no_network(hub: FakeHub) -> None:
    folder = Path("assets/models", NAME)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(FILE | {"hidden_size": 128}))
    hub.status = 503
    assert described(NAME)["model"]["args"]["dim"] == 128


def test_a_flavor_of_an_installed_model_has_a_name() -> None:
    assert described("llama3/8B") == {"model": {"name": "llama3", "flavor": "8B"}}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama3/9B", "llama3/9B: model 'llama3' has no such flavor; .*8B"),
        ("nowhere", "nowhere: is neither a folder nor the name of a model"),
        (".", r"\.: contains neither config.json nor params.json; name the folder of a model"),
        ("org/Other", "org/Other: does not exist, or HF_TOKEN has no access to it"),
        ("org/Empty", "org/Empty at .*: contains no config.json, so it is not a model"),
    ],
)
def test_what_describes_no_model_is_refused(hub: FakeHub, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        described(name)


def test_without_a_network_the_error_names_the_model_and_the_network(hub: FakeHub) -> None:
    hub.status = 503
    with pytest.raises(UserError, match=f"{NAME}: cannot be downloaded: .*check the network"):
        described(NAME)


def test_a_recipe_in_no_file_is_one_like_any_other() -> None:
    tables = {"model": {"name": "llama3", "flavor": "debug"}, "training": {"seq_len": 64, "local_batch_size": 2}}
    context = invocation((Override("training.local_batch_size", "3"),)).with_recipe("--model llama3/debug", tables)
    config: Config = context.config()
    training = config.section(TrainingSection)
    assert (training.seq_len, training.local_batch_size, config.section(ModelSection).flavor) == (64, 3, "debug")
    assert config.value("job.dump_folder") == "outputs/debug"
    assert context.job(2, missing_ok=True).batch.global_size == 6
    wrong = invocation().with_recipe("--model llama3/debug", {**tables, "training": {"seq_len": 0}})
    with pytest.raises(UserError, match=r"--model llama3/debug: training\.seq_len = 0"):
        wrong.config()
