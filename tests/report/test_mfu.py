"""MFU in reports and comparisons: an estimate is marked as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.made_runs import write_run
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.compare.outcome import outcome_of, rows_of
from titan_report.summary import summary


@pytest.mark.parametrize("mfu", [0.5, 1.5], ids=["plausible", "impossible"])
def test_an_estimate_is_marked(tmp_path: Path, mfu: float) -> None:
    folder = write_run(tmp_path / "run", more=lambda step: {"mfu": mfu, "mfu_estimated": True})
    run = RunLog.read(folder)
    (row,) = summary([run], ["run"]).rows
    (compared,) = rows_of([("one", outcome_of([run], after=0))], "speed")
    for cells in (row, compared):
        assert any(cell.startswith("~") and cell.endswith("(peak too low)" if mfu > 1 else "%") for cell in cells)


def test_records_of_earlier_versions_are_read(in_tmp: Any) -> None:
    record = {"step": 1, "loss": 1.0, "tokens_per_second": 1.0, "step_seconds": 1.0, "mfu": 0.5, "memory_peak_gib": 1.0}
    (row,) = rows_of([("one", outcome_of([RunLog(in_tmp, {}, [], [record], [], [])], after=0))], "speed")
    assert "50.0%" in row
