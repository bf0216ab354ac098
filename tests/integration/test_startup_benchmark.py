"""The start-up benchmark runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STARTUP = Path(__file__).parents[2] / "benchmarks/startup.py"


@pytest.mark.long
def test_the_first_step_of_titan_and_of_a_bare_script_are_timed() -> None:
    command = [sys.executable, str(STARTUP), "--rounds", "1", "--training.seq_len", "64"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines()]
    assert [row[0].strip() for row in rows] == ["first step", "---", "bare script", "titan train", "ratio (median)"]
    assert all(float(cell) > 0 for row in rows[2:] for cell in row[1:])
