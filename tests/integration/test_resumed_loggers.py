"""TensorBoard, Weights & Biases and the logger of docs/loggers.md across a run that stops and resumes."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.wandb_file import history, records, run_of
from titan_core.cli.main import main
from titan_core.toolkit.json_lines import read_lines
from titan_testing.jobs import TINY, make_job, run_recipe

RUN: dict[str, object] = {
    **TINY,
    "job.dump_folder": "run",
    "metrics.log_freq": 1,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
}
PAGE = Path(__file__).parents[2] / "docs/loggers.md"


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


@pytest.fixture
def quiet_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()


def test_tensorboard_reads_back_the_figures_of_a_resumed_run(in_tmp: Path) -> None:
    board = {**RUN, "metrics.enable_tensorboard": "true"}
    run_recipe("tiny", {**board, "training.stop_at_step": 2})
    run_recipe("tiny", board)
    events = EventAccumulator(str(in_tmp / "run/logs/tensorboard"))
    events.Reload()
    written = metrics(in_tmp / "run")
    assert [line["step"] for line in written] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "lr", "tokens_per_second", "memory_peak_gib", "tokens_seen"):
        scalars = events.Scalars(name)
        assert [one.step for one in scalars] == [1, 2, 3, 4]
        assert [one.value for one in scalars] == pytest.approx([line[name] for line in written])
        assert [one.wall_time for one in scalars] == pytest.approx([line["time"] for line in written])
    (text,) = (one for one in events.Tags()["tensors"] if one.startswith("config"))
    assert b"seq_len = 32" in events.Tensors(text)[0].tensor_proto.string_val[0]


@pytest.mark.full
def test_an_offline_wandb_run_is_read_back_and_continued(in_tmp: Path, quiet_wandb: None) -> None:
    offline = {**RUN, "metrics.enable_wandb": "true", "metrics.wandb_mode": "offline"}
    run_recipe("tiny", {**offline, "training.stop_at_step": 2})
    run_recipe("tiny", {**offline, "job.description": "went on"})
    wandb.teardown()  # a separate process writes the files
    first, second = sorted((in_tmp / "run/logs/wandb").glob("offline-run-*/*.wandb"))  # named by start time
    logged = [*history(first), *history(second)]
    written = metrics(in_tmp / "run")
    for name in ("step", "loss", "grad_norm", "lr", "tokens_seen"):
        assert [line[name] for line in logged] == pytest.approx([line[name] for line in written])
    runs = [run_of(file) for file in (first, second)]
    assert runs[0].run_id == runs[1].run_id == (in_tmp / "run/logs/wandb_run_id").read_text().strip()
    assert runs[0].project == "titan" and runs[0].display_name == "run"
    config = {one.key: json.loads(one.value_json) for one in runs[0].config.update}
    assert config["training"]["seq_len"] == 32
    job = make_job("tiny", {**offline, "training.stop_at_step": 2})
    assert config["titan"]["digest"] == job.digest()
    assert config["titan"]["plugins"]["titan-core:core"]
    exits = [record.exit.exit_code for record in records(second) if record.WhichOneof("record_type") == "exit"]
    assert exits == [0]


def test_the_logger_of_the_page_writes_the_metrics_of_a_run_and_of_its_continuation(in_tmp: Path) -> None:
    (code,) = re.findall(r"(?ms)^```python\n# sqlite_log.py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    assert len(code.splitlines()) <= 60
    (in_tmp / "sqlite_log.py").write_text(code)
    command = [
        "--plugin", "sqlite_log.py", "train", "tiny", "--sqlite.file", "metrics.db", "--job.dump_folder", "run",
        "--metrics.log_freq", "1", "--checkpoint.enable", "true", "--checkpoint.interval", "2", "--training.steps", "5",
    ]  # fmt: skip
    assert main([*command, "--training.stop_at_step", "3", "--checkpoint.keep_latest_k", "0"]) == 0
    database = sqlite3.connect("metrics.db")
    database.execute("INSERT INTO metrics SELECT run, 4, 'loss', 99.0 FROM metrics LIMIT 1")  # of a step that is lost
    database.commit()
    assert main(command) == 0
    found = database.execute("SELECT step, value FROM metrics WHERE name = 'loss' ORDER BY rowid").fetchall()
    database.close()
    assert found == [(line["step"], line["loss"]) for line in read_lines(in_tmp / "run/metrics.jsonl") if "loss" in line]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert "sqlite_log" not in sys.modules
