"""Predictions against the runs that TorchTitan's authors published (benchmarks/published.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("titan_simulate")

from benchmarks.published import ROWS, Row, predict

NAMES = ("8b-8-eager", "8b-8-compile", "8b-8-float8", "70b-float8", "70b-async")


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in NAMES], ids=lambda row: row.name)
def test_memory_within_15_percent_and_speed_within_20(row: Row) -> None:
    found = predict(row)
    assert found["reserved_gib"] == pytest.approx(row.gib, rel=0.15)
    assert found["peak_gib"] == pytest.approx(row.gib, rel=0.15)
    assert found["tokens_per_second_per_gpu"] == pytest.approx(row.tokens, rel=0.2)
