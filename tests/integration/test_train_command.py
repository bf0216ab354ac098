"""``titan train`` as a user runs it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from titan_core.api import DatasetContext, Recipe
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_core.data.stdlib import open_stdlib
from titan_core.plugins.registry import Components
from titan_testing import PATIENCE

SMALL = [
    "--training.steps", "20", "--metrics.log_freq", "1", "--training.seq_len", "64", "--job.device", "cpu",
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}",
]  # fmt: skip


def titan(*arguments: str, cwd: Path, module: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [*(module or [sys.executable, "-m", "titan_core"]), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_two_processes_have_the_losses_of_one_without_any_flag(tmp_path: Path) -> None:
    one = titan("train", *SMALL, "--job.dump_folder", "one", cwd=tmp_path)
    two = titan("train", "--nproc-per-node", "2", *SMALL, "--job.dump_folder", "two", cwd=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "titan_core"]
    plain = titan("train", *SMALL, "--job.dump_folder", "plain", cwd=tmp_path, module=torchrun)
    for result in (one, two, plain):
        assert result.returncode == 0, result.stderr
    assert two.stdout.count("step  1/20") == 1  # only rank 0 prints
    losses = {name: [line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two", "plain")}
    assert len(losses["one"]) == 20
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)
    assert losses["plain"] == losses["two"]


@pytest.mark.long
def test_the_default_recipe_learns_more_than_letter_frequencies(tmp_path: Path) -> None:
    result = titan("train", "--training.steps", "36", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    last = metrics(tmp_path / "outputs/llama3_debug")[-1]
    assert last["step"] == 36
    assert last["loss"] < 0.9 * unigram_entropy()


def unigram_entropy() -> float:
    """Return the entropy of the embedded corpus in nats per token, by token frequencies."""
    tokenizer = ByteTokenizer()
    counts: Counter[int] = Counter()
    for text in open_stdlib(DatasetContext("stdlib", None, "text", 0, "", section=None)).shard(0, 1, 0):
        counts.update(tokenizer.encode_document(text))
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


def test_a_mistake_is_reported_once_before_any_process_starts(tmp_path: Path) -> None:
    result = titan("train", "--nproc-per-node", "2", "--training.seq_len", "9999", cwd=tmp_path)
    assert result.returncode == 2
    (error,) = (line for line in result.stderr.splitlines() if not line.endswith(" ..."))  # a slow phase has a line too
    assert "training.seq_len = 9999: the model accepts at most 2048 tokens" in error


@pytest.mark.full
def test_a_failure_in_a_rank_ends_the_launcher_with_its_status(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"text": "too few"}\n' * 3)
    data = ["--training.dataset", "json", "--training.dataset_path", "few.jsonl"]
    result = titan("train", "--nproc-per-node", "2", *SMALL, *data, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("has 3 documents, fewer than the 16 logical shards") == 1  # of two ranks
    assert "Traceback" not in result.stderr


@pytest.mark.full
def test_an_interrupt_prints_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan_core", "train", "--training.steps", "100000", "--metrics.log_freq", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    file = tmp_path / "outputs/llama3_debug/metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    lines = [line for line in err.strip().splitlines() if not line.endswith(" ...")]  # slow phases, on a slow machine
    first, *_, last = lines
    assert first == "titan: interrupted: stopping after this step; Ctrl-C again ends at once"
    saved = r"titan: interrupted after step (\d+), saved in outputs/llama3_debug/checkpoint/step-\1; to resume: .* train .*"
    assert re.fullmatch(saved, last)
    assert re.search(r"ended after step \d+ of 100000: interrupted after a complete step", out)


TINY = [
    "--model.args", "{dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 16}", "--training.seq_len", "32",
    "--training.local_batch_size", "1", "--training.global_batch_size", "2", "--training.steps", "2",
    "--job.device", "cpu", "--sample.max_new_tokens", "4",
]  # fmt: skip


def test_the_default_recipe_saves_samples_and_names_commands_that_work(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``titan train`` without any argument leaves a model, and shows what it writes."""
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    monkeypatch.setattr("sys.argv", ["titan", "train", *TINY])
    assert main(["train", *TINY]) == 0
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
