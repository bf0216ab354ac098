"""Absurd input to the keys and commands of every package: see ``tests/core/test_absurd_input.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.refusals import refused
from titan_core.plugins.registry import Components

OVERRIDES = [
    "model.args.rope_theta=1e-300", "model.args.norm_eps=inf", "model.args.rope_scaling={factor = 1e-30}",
    "model.args.rope_scaling={low_freq_factor = 4.0}", "comm.trace_buf_size=1000000000000", "comm.watchdog_seconds=0.001",
    "comm.watchdog_seconds=1e12", "profiling.profile_freq=1000000000000", "profiling.profiler_active=1000000000",
    "numerics.spike_window=1000000000000", "numerics.spike_sigma=inf", "checkpoint.keep_latest_k=1000000000000",
    "parallelism.pipeline_parallel_microbatch_size=1000000000000", "activation_checkpoint.memory_budget=nan",
    f"activation_checkpoint.selective_ac_option={'9' * 5000}", "activation_checkpoint.selective_ac_option=\u0663",
]  # fmt: skip


COMMANDS = [
    ["compare", "--vary", "optimizer.lr=1e-3,1e-4", "--steps", str(10**30)],
    ["compare", "--vary", "optimizer.lr=1e-3,1e-4", "--rounds", str(10**9)],
    ["compare", "--vary", "optimizer.lr=1e-3,1e-4", "--nproc-per-node", str(10**9)],
    ["verify", "--mesh", f"tp={10**30}"],
    ["verify", "--mesh", "tp=" + "9" * 5000],
    ["verify", "--mesh", "tp=2", "--tolerance", "inf"],
    ["verify", "--mesh", "tp=2", "--tolerance", "1e300"],
    ["verify", "--mesh", "tp=2", "--steps", "0"],
    ["data", "tokenize", "--workers", str(10**9), "--output", "x"],
    ["data", "tokenize", "--parts", str(10**12), "--output", "x"],
    ["watch", "run", "--interval", "1e-300"],
    ["watch", "run", "--interval", "1e12"],
    ["statistics", "run", "--wait", "1e300"],
    ["statistics", "run", "--step", "-1"],
    ["trace", "summary", "run", "--top", str(10**12)],
    ["checkpoint", "show", "run", "--step", str(10**30)],
    ["checkpoint", "rm", "run", "--step", "-3"],
]


REGISTRY = Components.from_installed()


@pytest.fixture(autouse=True)
def discovered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discover plugins once, because discovery takes longer than most of the checks."""
    monkeypatch.setattr(Components, "from_installed", lambda: REGISTRY)


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda one: ascii(one)[:60])
def test_a_value_on_the_command_line(override: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["train", "llama3_debug", f"--{override}"], capsys, override.partition("=")[0].partition(".")[2].split(".")[-1])
    assert list(in_tmp.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: " ".join(one)[:60])
def test_an_argument_of_a_command(command: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(command, capsys, "")


@pytest.mark.parametrize("command", [["report"], ["checkpoint", "list"], ["analyse"], ["statistics"], ["trace", "summary"]])
def test_a_path_that_no_file_system_accepts(command: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    for path in ("a" * 300, "file/below"):
        refused([*command, path], capsys, "")
