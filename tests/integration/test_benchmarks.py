"""Benchmarks run in their shortest forms. The larger ones have files of their own."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overhead import peaks

ROOT = Path(__file__).parents[2]


def printed_by(*arguments: str, cwd: Path = ROOT) -> str:
    result = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_a_rank_is_killed_and_the_parts_of_the_restart_are_timed() -> None:
    printed = printed_by("-m", "benchmarks.recovery", "--ranks", "2", "--rounds", "1")
    header, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines())
    found = dict(zip(header, map(float, row), strict=True))
    assert found["ranks"] == 2 and found["steps again"] <= 5  # checkpoint.interval
    parts = [found[name] for name in header[1 : header.index("from SIGKILL to the next step")]]
    assert found["import"] > 0 and sum(parts) <= found["from SIGKILL to the next step"] + 0.1 * len(parts)


@pytest.mark.long
def test_precisions_are_compared_without_a_gpu(tmp_path: Path) -> None:
    options = ["--steps", "3", "--only", "compiled float8, rowwise", "--compile.backend", "eager", "--job.device", "cpu"]
    printed = printed_by(
        str(ROOT / "benchmarks/precision.py"), "--csv", str(tmp_path / "curves.csv"), *options, cwd=tmp_path
    )
    assert "| eager bf16 |" in printed and "| compiled float8, rowwise |" in printed
    steps = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert len(steps) == 5  # two warmup steps and three measured ones
    assert float(steps[-1]["eager bf16"]) != float(steps[-1]["compiled float8, rowwise"])


SEQUENCES, LENGTH, VOCABULARY = 4, 64, 4096


def test_the_trainer_needs_fewer_bytes_at_its_peak_than_a_bare_loop(tmp_path: Path) -> None:
    """The loss in chunks saves the logits of the batch and their gradient. If losses differ, ``peaks`` raises."""
    settings = {
        "model.args": f"{{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64, vocab_size = {VOCABULARY}}}",
        "training.seq_len": str(LENGTH),
        "training.local_batch_size": str(SEQUENCES),
        "objective.chunk_tokens": "32",
    }
    bare, ours = peaks(settings, str(tmp_path))
    logits = 4 * SEQUENCES * LENGTH * VOCABULARY  # in fp32
    assert bare > 2 * logits
    assert ours < bare - 2 * logits


@pytest.mark.long
def test_the_first_step_of_titan_and_of_a_bare_script_are_timed() -> None:
    printed = printed_by(str(ROOT / "benchmarks/startup.py"), "--rounds", "1", "--training.seq_len", "64")
    rows = [line.split("|")[1:-1] for line in printed.splitlines()]
    assert [row[0].strip() for row in rows] == ["first step", "---", "bare script", "titan train", "ratio (median)"]
    assert all(float(cell) > 0 for row in rows[2:] for cell in row[1:])
