"""A cache holds what was used last, and no half file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan_core.toolkit.cache_folder import cache_folder, cached_file


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("TITAN_CACHE_DIR", raising=False)
    assert cache_folder("lines") == tmp_path / "xdg" / "titan" / "lines"
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder("lines") == tmp_path / "own" / "lines"


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    made = []

    def make(part: Path) -> None:
        made.append(part)
        part.write_bytes(b"x" * 10)

    for time, name in enumerate("abc"):
        os.utime(cached_file(tmp_path, name, make, 100), (time, time))
    assert cached_file(tmp_path, "a", make, 100).read_bytes() == b"x" * 10 and len(made) == 3
    cached_file(tmp_path, "d", make, 20)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "c", "d"], "b was used least recently"


def test_a_file_that_could_not_be_made_is_not_there(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        part.write_bytes(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        cached_file(tmp_path, "a", fail, 100)
    assert list(tmp_path.iterdir()) == []
