"""A newcomer's mistakes end with status 2 and one line that names the fix, without a traceback. (Mistakes of one package are
in its suite; an offline hub, for example, in ``tests/data/test_datasets.py``.)"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_core.cli.main import main
from titan_launch.meeting import meeting_point

RECIPE = """
[model]
name = "llama3"
[training]
steps = 1
seq_len = 64
local_batch_size = 1
"""
MACHINES = ["--nproc-per-node", "1", "--nnodes", "2", "--rdzv-endpoint"]


@pytest.fixture
def my(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TITAN_JOB_KEY", "the key of the machines of a test")
    (in_tmp / "my.toml").write_text(RECIPE)
    (in_tmp / "outputs/mine").mkdir(parents=True)
    yield in_tmp
    assert sorted(path.name for path in in_tmp.iterdir() if path.name != "outputs") == ["my.toml"]


def line_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("titan: error: ") and error.count("\n") == 1
    return error


MISTAKES: dict[str, tuple[list[str], str, str]] = {
    "wrong path": (["train", "recipes/my.toml"], "recipes/my.toml: does not exist", "check the path"),
    "a folder": (["train", "."], ".: cannot be read: Is a directory", "check the path"),
    "wrong recipe": (["train", "lama3_debug"], "neither a recipe nor a file", "did you mean 'llama3_debug'?"),
    "typo": (["train", "my.toml", "--steps", "5"], "--steps: no such option", "--training.steps 5"),
    "typo in an option with a short form": (
        ["report", "--outptu", "x.html", "run"], "--outptu: no such option", "did you mean --output x.html?"
    ),
    "typo in an option of a launcher": (
        ["train", "my.toml", "--nproc_per_node", "2"], "no such option", "did you mean --nproc-per-node 2?"
    ),
    "missing value": (["train", "my.toml", "--training.steps"], "needs a value", "write --training.steps VALUE"),
    "unknown host": (
        ["train", "my.toml", *MACHINES, "no-such-host.invalid:29500"], "cannot resolve the host name",
        "check the name, or use an IP address",
    ),
    "unreachable host": (
        ["train", "my.toml", *MACHINES, "192.0.2.1:1", "--rdzv-timeout", "1"], "nothing answered within 1 s",
        "check the host and the port",
    ),
    "missing tokenizer": (
        ["train", "my.toml", "--model.tokenizer", "hf", "--model.tokenizer_path", "no/tokenizer.json"], "no such file",
        "check the path",
    ),
    "no tokenizer path": (
        ["train", "my.toml", "--model.tokenizer", "hf"], "needs the path to a tokenizer.json", "titan tokenizer download"
    ),
    "too long a sequence": (
        ["train", "my.toml", "--training.seq_len", "1000000"], "the model accepts at most 2048 tokens", "lower it"
    ),
    "not a checkpoint": (["checkpoint", "list", "my.toml"], "there are no checkpoints here", "pass a run's directory"),
    "a file for a checkpoint": (["checkpoint", "show", "my.toml"], "my.toml: there are no checkpoints here", ""),
    "not a run": (["report", "my.toml"], "no such directory", "pass a run's directory"),
    "misspelt run": (
        ["generate", "outputs/min"], "does not exist, and no installed plugin knows a model of this name",
        "did you mean 'outputs/mine'?",
    ),
    "misspelt path": (["generate", "./outputs/min"], "outputs/min: does not exist", "did you mean 'outputs/mine'?"),
    "a model of the hub": (["generate", "owner/model"], "owner/model", "or run `titan model download owner/model`"),
    "a file for a model": (["generate", "my.toml"], "my.toml: is a file", "give a run's directory"),
    "a run without a model": (["generate", "outputs/mine"], "outputs/mine: there are no checkpoints here", ""),
    "a recipe for a model": (
        ["generate", "tiny"], "tiny: is a recipe, not a trained model",
        "train it first (`titan train tiny`), and give the run",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_with_the_fix(case: str, my: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, why, fix = MISTAKES[case]
    error = line_of(arguments, capsys)
    assert why in error and fix in error


def test_a_port_in_use(my: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(meeting_point, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        error = line_of(["train", "my.toml", *MACHINES, endpoint], capsys)
    assert "another server uses this port" in error and "choose another port" in error


def test_no_space_for_the_output() -> None:
    if not os.path.exists("/dev/full"):
        # No other file refuses each write as a full disk does.
        pytest.skip("/dev/full, a device without space, exists on Linux only")
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "titan_core", "plugins"]
        result = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 141
    assert result.stderr == (
        "titan: error: output: cannot be written: No space left on device; free some space, or write to another disk\n"
    )
