"""The benchmark of restarts runs, and a restarted job says what its restart cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_rank_is_killed_and_the_parts_of_the_restart_are_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.recovery", "--ranks", "2", "--rounds", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    header, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines())
    found = dict(zip(header, map(float, row), strict=True))
    assert found["ranks"] == 2 and found["steps again"] <= 5  # checkpoint.interval
    parts = [found[name] for name in header[1 : header.index("from SIGKILL to the next step")]]
    assert found["import"] > 0 and sum(parts) <= found["from SIGKILL to the next step"] + 0.1 * len(parts)
