"""Where commands look for what a run has left: its config says so, whatever has become of its metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.made_runs import write_lines, write_run
from titan_core.cli.main import main
from titan_debug.flight.read import dump_folder
from titan_debug.profiling.trace_files import trace_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One whose metrics are damaged."""
    config = (
        "[comm]\nsave_traces_folder = 'a'\n[profiling]\nsave_traces_folder = 'b'\n[numerics]\nsave_statistics_folder = 'c'\n"
    )
    folder = write_run(tmp_path / "run", config=config)
    (folder / "metrics.jsonl").write_text("no JSON\n")
    return folder


def test_damaged_metrics_do_not_keep_dumps_traces_and_statistics_from_being_found(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dump_folder(str(run)) == run / "a"
    trace = run / "b" / "step-3" / "rank-0.json"
    trace.parent.mkdir(parents=True)
    trace.write_text("{}")
    assert trace_files(run) == [trace]
    assert main(["statistics", str(run)]) == 2
    told = capsys.readouterr().err
    assert str(run / "c") in told and "metrics.jsonl" not in told


@pytest.mark.parametrize(
    "config",
    [
        "comm = 3\nprofiling = 'a'\nnumerics = []\n",
        "[comm]\nsave_traces_folder = 5\n[profiling]\nsave_traces_folder = 5\n[numerics]\nsave_statistics_folder = 5\n",
    ],
)
@pytest.mark.parametrize("command", ["flight analyse", "trace summary", "statistics"])
def test_a_config_that_names_no_folder_is_reported(
    run: Path, command: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.toml").write_text(config)
    assert main([*command.split(), str(run)]) == 2
    assert "in its config.toml names no folder; restore its files" in capsys.readouterr().err


def test_a_foreign_event_is_named_when_a_dump_is_requested(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flight", "dump", str(run)]) == 2
    assert "it is not running" in capsys.readouterr().err
    write_lines(run / "events.jsonl", [{}], mode="a")
    assert main(["flight", "dump", str(run)]) == 2
    assert "events.jsonl:3: this line is none of a run's: it has no 'event'" in capsys.readouterr().err
    assert main(["flight", "dump", str(run / "none")]) == 2
    assert "there is no such directory" in capsys.readouterr().err
