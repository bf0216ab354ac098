"""Fixtures of the tests of titan-data."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which Titan keeps what it derives from the files of this test."""
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "titan-cache"))
    return tmp_path / "titan-cache"
