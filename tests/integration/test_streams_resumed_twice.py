"""Through the whole trainer: a run that stops twice is bit for bit the run that does not stop, whatever its dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import resuming
from harness.fake_hub import folders_for_the_hub
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord


@folders_for_the_hub()
def run_in(folder: str, overrides: dict[str, object]) -> RunRecord:
    return resuming.run_in(folder, overrides)


TEXTS = [f"document {number} " + "of words " * (number * 7 % 5) for number in range(60)]


def write_files(folder: Path) -> None:
    folder.mkdir()
    for number, texts in enumerate((TEXTS[:25], TEXTS[25:])):
        lines = "".join(json.dumps({"text": text, "prompt": text, "completion": "so it ends"}) + "\n" for text in texts)
        (folder / f"train-{number}.jsonl").write_text(lines)


DATASETS: dict[str, dict[str, object]] = {
    "hub": {"data.shuffle_buffer": 0},
    "hub, shuffled": {"data.shuffle_buffer": 5},
    "json": {},
    "text": {},
    "chat": {"chat.template": "none", "data.document_mask": "true"},
    "stdlib": {},
    "mixture": {
        "data.shuffle_buffer": 5,
        "data.mixture": '[{dataset = "hub", dataset_path = "files", weight = 0.8, name = "web"}, '
        '{dataset = "json", dataset_path = "files", weight = 0.2, name = "local"}]',
    },
}


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [kind if kind == "mixture" else pytest.param(kind, marks=pytest.mark.full) for kind in DATASETS]
)
def test_a_run_that_stops_twice_is_the_run_that_does_not(gloo: GlooPool, tmp_path: Path, kind: str) -> None:
    write_files(tmp_path / "files")
    if kind == "text":
        (tmp_path / "files/train-0.txt").write_text("".join(f"{text}\n" for text in TEXTS) * 400)
    name = kind.partition(",")[0]
    chosen: dict[str, object] = {} if kind == "mixture" else {"training.dataset": name}
    if kind not in ("mixture", "stdlib"):
        chosen["training.dataset_path"] = "files"
    settings = {**DATASETS[kind], **chosen, "checkpoint.interval": 100}
    (whole,) = gloo.run(1, run_in, str(tmp_path), {**settings, "job.dump_folder": "whole"})
    losses = []
    for stop in (3, 5, 8):
        overrides = {**settings, "job.dump_folder": "parts", "training.stop_at_step": stop}
        (record,) = gloo.run(1, run_in, str(tmp_path), overrides)
        losses += record.losses
    assert losses == whole.losses
    assert all((record.final[name] == tensor).all() for name, tensor in whole.final.items())


def test_a_changed_stream_is_refused_before_a_step(gloo: GlooPool, tmp_path: Path) -> None:
    write_files(tmp_path / "files")
    settings: dict[str, object] = {"training.dataset": "hub", "training.dataset_path": "files", "job.dump_folder": "run"}
    gloo.run(1, run_in, str(tmp_path), {**settings, "training.stop_at_step": 3})
    file = tmp_path / "files/train-0.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))  # one record lost
    (message,) = gloo.run(1, refused, str(tmp_path), settings)
    assert message.startswith("dataset 'hub', logical shard ")
    assert "data position mismatch" in message
    allowed = {**settings, "checkpoint.allow_changed": '["dataset.hub.content"]'}
    (record,) = gloo.run(1, run_in, str(tmp_path), allowed)
    assert len(record.losses) == 5


def refused(folder: str, overrides: dict[str, object]) -> str:
    from titan_core.api import UserError

    try:
        run_in(folder, overrides)
    except UserError as error:
        return str(error)
    return "trained"
