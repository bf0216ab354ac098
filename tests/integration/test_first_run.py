"""``titan train`` without any argument leaves a model, shows what it writes, and names commands that work as printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from titan_core.api import Recipe
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.plugins.registry import Components

SMALL = [
    "--model.args", "{dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 16}", "--training.seq_len", "32",
    "--training.local_batch_size", "1", "--training.global_batch_size", "2", "--training.steps", "2",
    "--job.device", "cpu", "--sample.max_new_tokens", "4",
]  # fmt: skip


def test_the_default_recipe_saves_samples_and_names_commands_that_work(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    monkeypatch.setattr("sys.argv", ["titan", "train", *SMALL])
    assert main(["train", *SMALL]) == 0
    assert "not be saved" not in caplog.text and "omitted" not in caplog.text
    assert Path("outputs/llama3_debug/checkpoint/step-2/checkpoint.json").exists()
    lines = capsys.readouterr().out.splitlines()
    assert "sample after step 2, from 'def ':" in lines
    commands = [shlex.split(line.partition(" titan ")[2]) for line in lines[lines.index("next:") + 1 :]]
    assert [command[0] for command in commands] == ["generate", "report", "train"]
    for command in commands:
        more = ["--max-new-tokens", "2"] if command[0] == "generate" else []
        monkeypatch.setattr("sys.argv", ["titan", *command])
        assert main([*command, *more]) == 0, command
    assert Path("outputs/llama3_debug/checkpoint/step-4/checkpoint.json").exists()
    assert Path("outputs/llama3_debug/report.html").exists()


def test_the_default_recipe_needs_neither_checkpoints_nor_generation() -> None:
    registry = Components.from_installed()
    (default,) = [recipe.name for recipe in registry.all(Recipe) if recipe.default]
    disabled = [plugin.name for plugin in registry.found.plugins if plugin.distribution in ("titan-ckpt", "titan-inference")]
    config, _ = load_config(default, [], registry.without(disabled))
    assert [note.partition(" is omitted: ")[0] for note in config.notes] == ["[checkpoint]", "[sample]"]
    assert not load_config(default, [], registry)[0].notes
