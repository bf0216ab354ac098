"""Commands find a run's folders by its config, even if its metrics are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.made_runs import write_lines, write_run
from titan_core.cli.main import main
from titan_debug.flight.dump import dump_folder
from titan_debug.profiling.traces import trace_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with damaged metrics."""
    config = (
        "[comm]\nsave_traces_folder = 'a'\n[profiling]\nsave_traces_folder = 'b'\n[numerics]\nsave_statistics_folder = 'c'\n"
    )
    folder = write_run(tmp_path / "run", config=config)
    (folder / "metrics.jsonl").write_text("no JSON\n")
    return folder


def test_dumps_traces_and_statistics_are_found_although_the_metrics_are_damaged(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dump_folder(str(run)) == run / "a"
    trace = run / "b" / "step-3" / "rank-0.json"
    trace.parent.mkdir(parents=True)
    trace.write_text("{}")
    assert trace_files(run) == [trace]
    assert main(["statistics", str(run)]) == 2
    error = capsys.readouterr().err
    assert f"{run / 'c'}: contains no statistics; train with" in error and "metrics.jsonl" not in error


@pytest.mark.parametrize(
    "config",
    [
        "comm = 3\nprofiling = 'a'\nnumerics = []\n",
        "[comm]\nsave_traces_folder = 5\n[profiling]\nsave_traces_folder = 5\n[numerics]\nsave_statistics_folder = 5\n",
    ],
)
@pytest.mark.parametrize("command", ["analyse", "trace summary", "statistics"])
def test_a_config_with_an_invalid_folder_is_reported(
    run: Path, command: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.toml").write_text(config)
    assert main([*command.split(), str(run)]) == 2
    assert (
        "in its config.toml must be a folder below the run's directory, such as debug/mine; restore the run's files"
        in capsys.readouterr().err
    )


def test_a_foreign_event_is_named_when_a_dump_is_requested(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flight", "dump", str(run)]) == 2
    assert "is not running" in capsys.readouterr().err
    write_lines(run / "events.jsonl", [{}], mode="a")
    assert main(["flight", "dump", str(run)]) == 2
    assert "events.jsonl:3: invalid record: it has no 'event'" in capsys.readouterr().err
    assert main(["flight", "dump", str(run / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err
