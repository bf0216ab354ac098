"""The order in which a checkpoint reaches the disk: after a power failure at any moment it is whole, or known as unfinished.

A file's contents are durable after an ``fsync`` of the file, and its name after one of the folder (POSIX promises no more).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from titan_ckpt.format.folder import Folder
from titan_ckpt.format.writer import Writer
from titan_ckpt.save.retention import remove

STEP = "step-3"


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to files below ``tmp_path``, in order: ``sync NAME``, ``rename NAME`` (to the new name) and ``remove
    NAME``. Names are relative to the folder of checkpoints, which is ``.``."""
    seen: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def record(what: str, path: str) -> None:
        seen.append(f"{what} {os.path.relpath(path, tmp_path)}")

    def recorded_sync(descriptor: int) -> None:
        fsync(descriptor)
        record("sync", os.readlink(f"/proc/self/fd/{descriptor}"))

    def recorded_replace(source: str, target: str) -> None:
        replace(source, target)
        record("rename", target)

    def recorded_removal(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        record("remove", path if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}")

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    monkeypatch.setattr(os, "unlink", recorded_removal)
    return seen


def saved(folder: Folder) -> None:
    writer = Writer(folder / STEP, rank=0, step=3, about={}, state={})
    writer.save({"weight": torch.arange(4.0)})


def test_a_checkpoint_is_durable_before_it_counts(tmp_path: Path, events: list[str]) -> None:
    saved(Folder(str(tmp_path)))
    new_names = [f"sync {STEP}", "sync ."]
    assert events == [
        # The mark that the checkpoint is unfinished precedes its data,
        f"sync {STEP}/unfinished.new", f"rename {STEP}/unfinished", *new_names,
        # whose contents and name precede the manifest,
        f"sync {STEP}/data-00000.bin", *new_names,
        # whose contents precede its name,
        f"sync {STEP}/checkpoint.json.new", f"rename {STEP}/checkpoint.json", *new_names,
        # and only then the mark goes.
        f"remove {STEP}/unfinished",
    ]  # fmt: skip


def test_a_removed_checkpoint_stops_counting_before_its_data_goes(tmp_path: Path, events: list[str]) -> None:
    folder = Folder(str(tmp_path))
    saved(folder)
    events.clear()
    remove(folder, 3)
    assert events == [
        f"sync {STEP}/unfinished.new", f"rename {STEP}/unfinished", f"sync {STEP}", "sync .",
        f"remove {STEP}/checkpoint.json", f"sync {STEP}", "sync .",
        f"remove {STEP}/data-00000.bin",
        f"remove {STEP}/unfinished",
    ]  # fmt: skip
    assert not (tmp_path / STEP).exists()


def test_the_mark_of_an_unfinished_checkpoint_is_removed_last(tmp_path: Path, events: list[str]) -> None:
    folder = Folder(str(tmp_path))
    (tmp_path / STEP).mkdir()
    for name in ("data-00000.bin", "unfinished", "data-00001.bin"):
        (tmp_path / STEP / name).touch()
    remove(folder, 3)
    removed = [event.removeprefix(f"remove {STEP}/") for event in events if event.startswith("remove")]
    assert removed == ["data-00000.bin", "data-00001.bin", "unfinished"]
    assert not (tmp_path / STEP).exists()


def test_a_large_file_is_synced_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr("titan_ckpt.format.folder._FLUSH_BYTES", 10)
    monkeypatch.setattr(os, "fsync", counted)
    with Folder(str(tmp_path)).create("data") as file:
        for _ in range(3):
            file.write(b"12345678")
    assert synced[-1] == 24
    assert len(synced) >= 2 and synced[0] >= 16


def test_an_error_of_an_early_sync_fails_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError("no space left")])

    def failing(descriptor: int) -> None:
        if error := next(failures, None):
            raise error

    monkeypatch.setattr("titan_ckpt.format.folder._FLUSH_BYTES", 1)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="no space left"), Folder(str(tmp_path)).create("data") as file:
        file.write(b"12345678")
