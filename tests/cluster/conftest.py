"""Fixtures of the tests of clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A working directory in which the programs of a cluster are fakes."""
    fakes = FakeCluster.create(tmp_path / "bin")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for name, value in fakes.environment.items():
        monkeypatch.setenv(name, value)
    return fakes
