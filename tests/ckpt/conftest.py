"""Fixtures of DCP checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.dcp import weights, write


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP checkpoint of weights."""
    folder = tmp_path_factory.mktemp("dcp") / "original"
    write(folder, weights())
    return folder


@pytest.fixture
def copied(original: Path, in_tmp: Path) -> Path:
    """A copy of :func:`original` to damage."""
    for file in original.iterdir():
        (in_tmp / "source").mkdir(exist_ok=True)
        (in_tmp / "source" / file.name).write_bytes(file.read_bytes())
    return Path("source")
