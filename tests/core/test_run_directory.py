"""The run directory: an older run is moved aside, and a resumed run continues its files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_core.api import RunEnd, UserError
from titan_core.runlog.reporter import MetricsFile
from titan_core.runlog.run_directory import RunDirectory
from titan_testing.jobs import TINY, make_job, run_recipe


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
    log = MetricsFile(None)  # type: ignore[arg-type] # reads nothing in its context
    log.titan_train_start(SimpleNamespace(dump_folder=str(tmp_path)))  # type: ignore[arg-type]
    log.titan_metrics({"step": 3})
    log.titan_train_end(RunEnd(3, completed=True, reason=""))
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


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_fresh_start_moves_the_logs_of_older_runs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """The launcher already writes the logs of this run when it begins; a restart keeps those of its first attempt."""
    for name in ("rank-0.log", "rank-7.log", "attempt-1/rank-0.log", "attempt-2/rank-0.log", "wandb_run_id"):
        file = tmp_path / "logs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
    monkeypatch.setenv("TITAN_RANK_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    RunDirectory(tmp_path).begin(make_job("tiny"), step=0)

    def files(folder: Path) -> set[str]:
        return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}

    kept = {"rank-0.log", *(["attempt-2/rank-0.log"] if restarts else [])}
    older = {"rank-7.log", "wandb_run_id", "attempt-1/rank-0.log", "attempt-2/rank-0.log"} - kept
    assert (files(tmp_path / "logs"), files(tmp_path / "previous/1/logs")) == (kept, older)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_fresh_start_moves_all_logs_if_this_run_writes_none_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").write_text("text")
    if elsewhere:
        monkeypatch.setenv("TITAN_RANK_LOGS", str(tmp_path / "elsewhere"))
    RunDirectory(tmp_path).begin(make_job("tiny"), step=0)
    assert (tmp_path / "previous/1/logs/rank-0.log").read_text() == "text"
