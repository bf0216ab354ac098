"""No secret in a config is written or shown: not by a run, its checkpoints or its files, nor by an error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch.distributed as dist

from titan_completion.schema import json_schema
from titan_core.api import Model, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.secrets import REDACTED, is_redacted, is_secret, redact_text
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.config.render import to_toml
from titan_core.loop.world import require_same_job
from titan_core.plugins.discovery import discover
from titan_core.plugins.registry import Components
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, make_job, run_recipe

SECRETS = {
    "job.description": "https://user:s3cret-a@host/data?token=s3cret-b&part=2#access_token=s3cret-f, X-Api-Key: s3cret-g, "
    "HF_TOKEN=s3cret-h, {'password': 's3cret-i'}, Authorization: Bearer s3cret-c",
    "validation.dataset_path": "https://user:s3cret-d@host/data",
    "metrics.wandb_project": "https://hf_s3cret-e@host/x",
}
"""Secrets in keys that the test's run does not use."""


def test_no_file_of_a_run_contains_a_secret(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, object] = {
        **TINY, **SECRETS, "checkpoint.enable": "true", "checkpoint.interval": 2, "job.dump_folder": "run",
        "metrics.enable_tensorboard": "true",
    }  # fmt: skip
    words = [word for key, value in SECRETS.items() for word in (f"--{key}", value)]
    monkeypatch.setattr("sys.argv", ["titan", "train", "llama3_debug", *words, "--metrics.note=HF_TOKEN=s3cret-j"])
    for steps in (2, 4):  # a fresh start, then a resume that archives changed files
        run_recipe("llama3_debug", {**settings, "training.steps": 4, "training.stop_at_step": steps})
    assert main(["report", "run", "--output", "run/report.html"]) == 0
    files = [file for file in (in_tmp / "run").rglob("*") if file.is_file()]
    assert {"config.toml", "checkpoint.json", "events.jsonl", "plugins.json"} <= {file.name for file in files}
    assert any("previous" in file.parts for file in files)
    assert [str(file) for file in files if b"s3cret" in file.read_bytes()] == []
    config = tomli.loads((in_tmp / "run/config.toml").read_text())
    assert config["validation"]["dataset_path"] == f"https://{REDACTED}@host/data"
    shown = capsys.readouterr()
    assert "s3cret" not in shown.out + shown.err


def test_a_recipe_without_its_secret_is_refused(in_tmp: Path) -> None:
    given = [Override(key, str(value)) for key, value in SECRETS.items()]
    registry = Components.from_installed()
    config, _ = load_config("llama3_debug", given, registry)
    (in_tmp / "again.toml").write_text(to_toml(config))
    with pytest.raises(UserError) as caught:
        load_config("again.toml", [], registry)
    assert len(caught.value.problems) == len(SECRETS)
    assert (
        "its secret was removed when this config was written; set it again, for example with --validation.dataset_path VALUE"
        in str(caught.value)
    )
    again, _ = load_config("again.toml", given, registry)
    assert again.as_dict() == config.as_dict()


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        (REDACTED, True),
        (redact_text("s3://key:value@host/x"), True),
        (redact_text("see https://host/x?a=1&api_key=value"), True),
        (redact_text("Authorization: Bearer abcdefgh"), True),
        ("the weights of the head (left out) are new", False),
        ("https://host/x?a=1", False),
    ],
)
def test_a_text_lacks_a_secret_if_one_was_left_out(text: str, lacks: bool) -> None:
    assert is_redacted(text) is lacks
    assert is_redacted({"a": [text]}) is lacks


@pytest.mark.parametrize("arguments", [["--training.seq_len", "x"], ["--training.steps", "0"]])
def test_errors_and_commands_show_no_secret(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["--validation.dataset_path", "https://user:s3cret@host/a\0b", "--a.api_key", "s3cret", *arguments]
    assert main(["config", "check", "llama3_debug", *bad]) == 2
    assert main(["config", "show", "llama3_debug", "--validation.dataset_path", "https://user:s3cret@host"]) == 0
    shown = capsys.readouterr()
    assert "s3cret" not in shown.out + shown.err and "--a.*: no installed plugin" in shown.err


def _compare(passwords: list[str]) -> str:
    password = passwords[int(os.environ["RANK"])]
    job = make_job("llama3_debug", {"validation.dataset_path": f"https://user:{password}@host"}, 1)
    dist.init_process_group("gloo")
    try:
        require_same_job(job)
    except UserError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_ranks_compare_secrets_and_do_not_show_them(gloo: GlooPool) -> None:
    for report in gloo.run(2, _compare, ["s3cret-1", "s3cret-2"]):
        assert "s3cret" not in report and "rank 1: its job differs from that of rank 0 in a secret" in report
    assert gloo.run(2, _compare, ["s3cret-1", "s3cret-1"]) == ["", ""]


def test_a_job_is_identified_by_its_secrets_but_does_not_show_them() -> None:
    one, other = (make_job("llama3_debug", {"validation.dataset_path": f"https://u:s3cret{n}@host"}) for n in (1, 2))
    assert one.digest() != other.digest()
    identities: list[dict[str, Any]] = [one.identity(), other.identity()]
    assert identities[0] == identities[1] and "s3cret" not in json.dumps(identities)


def names_in(schema: Any) -> Iterator[str]:
    """Yield the names of all properties in ``schema``."""
    if isinstance(schema, Mapping):
        yield from schema.get("properties", {})
        for one in schema.values():
            yield from names_in(one)
    elif isinstance(schema, list):
        for one in schema:
            yield from names_in(one)


def test_no_key_of_titan_is_mistaken_for_a_secret() -> None:
    registry = Components(discover())
    names = set(names_in(json_schema(registry)))
    for model in registry.all(Model):
        names.update(*(vars(flavor) for flavor in model.flavors.values()))
    assert {"tokenizer_path", "save_traces_folder", "lr", "training"} <= names
    assert [name for name in sorted(names) if is_secret(name)] == ["webhook_url"]  # whoever has it may post
