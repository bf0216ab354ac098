"""The run directory: an older run is moved aside, and a resumed run continues its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.jobs import TINY, make_job, run_recipe
from titan_core.api.errors import UserError
from titan_core.runlog.jsonl import MetricsFile
from titan_core.runlog.run_directory import RunDirectory


def test_a_fresh_start_never_mixes_with_an_older_run(in_tmp: Path) -> None:
    run_recipe("tiny", TINY)
    old = (in_tmp / "outputs/tiny/metrics.jsonl").read_text()
    run_recipe("tiny", {**TINY, "training.steps": 2})
    folder = in_tmp / "outputs/tiny"
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert (folder / "previous/1/metrics.jsonl").read_text() == old
    assert sorted(file.name for file in (folder / "previous/1").iterdir()) == [
        "config.toml",
        "events.jsonl",
        "metrics.jsonl",
        "plugins.json",
    ]


def test_a_resumed_run_drops_what_was_logged_after_its_checkpoint_and_keeps_a_copy(tmp_path: Path) -> None:
    torn = '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo'
    (tmp_path / "metrics.jsonl").write_text(torn)
    RunDirectory(tmp_path).begin(make_job("tiny"), step=2)
    log = MetricsFile(tmp_path / "metrics.jsonl")
    log.log({"step": 3})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert (tmp_path / "previous/1/metrics.jsonl").read_text() == torn


@pytest.mark.parametrize("line", ['{"a": 1}', '{"step": "x"}', "no JSON", None], ids=str)
def test_a_run_does_not_resume_damaged_files(tmp_path: Path, line: str | None) -> None:
    metrics = tmp_path / "metrics.jsonl"
    if line is None:
        metrics.mkdir()
    else:
        metrics.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(UserError, match="metrics.jsonl: is a folder" if line is None else "metrics.jsonl:2: "):
        RunDirectory(tmp_path).begin(make_job("tiny"), step=2)
