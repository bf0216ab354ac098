"""TensorBoard and Weights & Biases: the libraries themselves read the logged metrics back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_core.api import UserError
from titan_core.toolkit.json_lines import read_lines
from titan_testing.jobs import TINY, make_job, run_recipe

RUN: dict[str, object] = {**TINY, "job.dump_folder": "run"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


@pytest.fixture
def quiet_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()


@pytest.mark.full
def test_a_fresh_start_is_a_new_wandb_run(in_tmp: Path, quiet_wandb: None) -> None:
    offline = {**RUN, "training.steps": 1, "metrics.enable_wandb": "true", "metrics.wandb_mode": "offline"}
    ids = []
    for _ in range(2):
        run_recipe("tiny", offline)
        ids.append((in_tmp / "run/logs/wandb_run_id").read_text())
    assert ids[0] != ids[1]
    assert (in_tmp / "run/previous/1/logs/wandb_run_id").read_text() == ids[0]


def test_a_missing_library_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_report.config.find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        make_job("tiny", {"metrics.enable_wandb": "true", "metrics.enable_tensorboard": "true"})
    first, second = sorted(map(str, caught.value.problems))
    assert (
        "metrics.enable_tensorboard = true: the package tensorboard is not installed; install titan-report[tensorboard]"
        in first
    )
    assert "metrics.enable_wandb = true: the package wandb is not installed; install titan-report[wandb]" in second


def test_tensorboard_reads_the_metrics_back(in_tmp: Path) -> None:
    run_recipe("tiny", {**RUN, "metrics.enable_tensorboard": "true", "metrics.log_freq": 1})
    events = EventAccumulator(str(in_tmp / "run/logs/tensorboard"))
    events.Reload()
    written = metrics(in_tmp / "run")
    for name in ("loss", "grad_norm", "lr", "tokens_seen"):
        assert [scalar.value for scalar in events.Scalars(name)] == pytest.approx([line[name] for line in written])
