"""A few of the cases of ``uv run python -m benchmarks.fuzz``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fuzz import checkpoints, hf_folders


def test_damaged_checkpoints(in_tmp: Path) -> None:
    assert checkpoints.run(25, 11, in_tmp) == []


def test_damaged_folders_of_hugging_face(in_tmp: Path) -> None:
    assert hf_folders.run(20, 11, in_tmp) == []
