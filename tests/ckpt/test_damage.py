"""Damage is detected, reported and never loaded, and no intact checkpoint is removed because of it."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest, verify_data
from titan_ckpt.format.stored import UNFINISHED, BrokenCheckpoint
from titan_ckpt.format.writer import Writer
from titan_core.api import UserError, hookimpl
from titan_core.toolkit.launching import RESTART
from titan_core.toolkit.runs.run_log import RunLog
from titan_testing import PATIENCE
from titan_testing.jobs import RunRecord, run_recipe

TINY: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}", "training.seq_len": 16,
    "training.local_batch_size": 2, "training.global_batch_size": 2, "training.steps": 6, "training.deterministic": "true",
    "checkpoint.enable": "true", "checkpoint.interval": 2, "job.device": "cpu",
}  # fmt: skip
CHECKPOINTS = Path("outputs/tiny/checkpoint")


def run(overrides: dict[str, object] | None = None, observers: tuple[Any, ...] = ()) -> RunRecord:
    return run_recipe("tiny", {**TINY, **(overrides or {})}, observers=observers)


@pytest.fixture
def saved(in_tmp: Path) -> RunRecord:
    """A run with checkpoints of steps 2 and 4."""
    whole = run({"job.dump_folder": "whole"})
    run({"training.stop_at_step": 4})
    return whole


def interrupted(step: int) -> None:
    """Create the leftovers of an interrupted save."""
    folder = CHECKPOINTS / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / UNFINISHED).touch()
    (folder / "data-00000.bin").write_bytes(b"half of it")


def flip(file: Path, place: float) -> None:
    """Flip one bit of the byte at ``place`` in the file, from 0.0 (first byte) to 1.0 (last byte)."""
    data = bytearray(file.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    file.write_bytes(data)


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a flipped byte": lambda data, manifest: flip(data, 0.5),
    "a flipped last byte": lambda data, manifest: flip(data, 1.0),
    "a flipped byte of the manifest": lambda data, manifest: replaced(manifest, '"tokens_seen":', '"tokens_sfen":'),
    "a changed number in the manifest": lambda data, manifest: replaced(manifest, '"step":4', '"step":5'),
    "garbage for a manifest": lambda data, manifest: manifest.write_bytes(b"\x00\xff garbage"),
    "the data of another step": lambda data, manifest: shutil.copy(data.parents[1] / "step-2" / data.name, data),
    "truncated data": lambda data, manifest: data.write_bytes(data.read_bytes()[:-1]),
    "no data": lambda data, manifest: data.unlink(),
    "no manifest": lambda data, manifest: manifest.unlink(),
}


def damage(kind: str, folder: Path) -> None:
    DAMAGE[kind](folder / "data-00000.bin", folder / "checkpoint.json")


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    saved: RunRecord, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    damage(kind, CHECKPOINTS / "step-4")
    with caplog.at_level(logging.WARNING, logger="titan_ckpt"):
        record = run()
    assert record.losses == saved.losses[2:]
    assert "step-4 cannot be used: " in caplog.text
    assert "resuming from step 2" in caplog.text


def test_a_job_does_not_start_over_if_all_checkpoints_are_damaged(saved: RunRecord) -> None:
    for step in (2, 4):
        damage("a flipped byte", CHECKPOINTS / f"step-{step}")
    with pytest.raises(
        UserError, match=r"no checkpoint in this folder can be used; set checkpoint.folder to another location"
    ) as caught:
        run()
    assert "data-00000.bin is damaged in " in str(caught.value)
    assert {path.name for path in CHECKPOINTS.iterdir()} == {"step-2", "step-4"}


def test_leftovers_of_an_interrupted_save_do_not_prevent_a_start(in_tmp: Path) -> None:
    interrupted(2)
    assert len(run().losses) == 6


def test_a_new_start_does_not_overwrite_data_without_a_manifest(in_tmp: Path) -> None:
    (CHECKPOINTS / "step-2").mkdir(parents=True)
    (CHECKPOINTS / "step-2" / "data-00000.bin").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"step-2: it is not complete: there is no checkpoint.json\n.*set checkpoint.folder"):
        run()
    assert (CHECKPOINTS / "step-2" / "data-00000.bin").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["no manifest", "a flipped byte of the manifest"])
def test_a_damaged_checkpoint_is_moved_aside_for_a_new_one_of_the_same_step(saved: RunRecord, kind: str) -> None:
    damage(kind, CHECKPOINTS / "step-4")
    data = (CHECKPOINTS / "step-4" / "data-00000.bin").read_bytes()
    run()
    assert {path.name for path in CHECKPOINTS.iterdir()} == {"step-2", "step-4", "step-4.aside-1", "step-6"}
    assert (CHECKPOINTS / "step-4.aside-1" / "data-00000.bin").read_bytes() == data


def test_leftovers_of_interrupted_saves_are_removed_and_damaged_checkpoints_are_kept(saved: RunRecord) -> None:
    interrupted(1)
    damage("a flipped byte of the manifest", CHECKPOINTS / "step-2")
    run()
    assert {path.name for path in CHECKPOINTS.iterdir()} == {"step-2", "step-4", "step-6"}


def test_resuming_from_an_older_step_warns_about_later_checkpoints(
    saved: RunRecord, caplog: pytest.LogCaptureFixture
) -> None:
    assert run({"checkpoint.load_step": 2}).losses == saved.losses[2:]
    assert "to remove them, run `titan checkpoint rm outputs/tiny/checkpoint --step 4`" in caplog.text


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", RESTART])
def test_a_restarted_job_keeps_its_progress_since_the_older_step(
    saved: RunRecord, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert run({"checkpoint.load_step": 2}).losses == saved.losses[4:]


@pytest.mark.parametrize("place", [0.0, 0.1, 0.37, 0.62, 0.99])
def test_verification_detects_any_flipped_byte(saved: RunRecord, place: float) -> None:
    folder = Folder(str(CHECKPOINTS / "step-4"))
    manifest = read_manifest(folder)
    (file,) = manifest.files.values()
    assert sum(verify_data(folder, manifest)) == manifest.num_bytes == file.num_bytes
    assert file.num_bytes + file.index_bytes == os.path.getsize(CHECKPOINTS / "step-4/data-00000.bin")
    flip(CHECKPOINTS / "step-4" / "data-00000.bin", place)
    with pytest.raises(BrokenCheckpoint, match=r"its checksum does not match"):
        list(verify_data(folder, read_manifest(folder)))


def test_a_checkpoint_of_another_model_is_refused_by_name(saved: RunRecord) -> None:
    with pytest.raises(
        UserError,
        match=r"is a checkpoint of tiny debug, .*tok_embeddings.weight has shape .* in the checkpoint and .* in this job",
    ):
        run({"model.args": "{dim = 64, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}"})
    with pytest.raises(UserError, match=r"layers.2.* is not in the checkpoint"):
        run({"model.args": "{dim = 32, n_layers = 3, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}"})
    with pytest.raises(UserError, match=r"layers.1.* is not in this job"):
        run({"model.args": "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}"})


def test_a_missing_step_is_refused(saved: RunRecord) -> None:
    with pytest.raises(UserError, match=r"step-3: it is not complete"):
        run({"checkpoint.load_step": 3})


@pytest.mark.parametrize("folder", ["taken", "nosuch://bucket/run", "s3://bucket/run"])
def test_a_folder_that_cannot_be_written_is_reported_before_training(in_tmp: Path, folder: str) -> None:
    Path("taken").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written: .*set checkpoint.folder to another location"):
        run({"checkpoint.folder": f"{in_tmp}/taken" if folder == "taken" else folder})


class FullDisk:
    """Limits the size of files from step ``first`` to step ``last``."""

    def __init__(self, first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.last = first, last
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._written = threading.Semaphore(0)
        save: Any = Writer.save

        def counted(*arguments: Any, **keywords: Any) -> Any:
            try:
                return save(*arguments, **keywords)
            finally:
                self._written.release()

        monkeypatch.setattr(Writer, "save", counted)

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # Checkpoints of steps 2 and 4 may be written in the background. Wait, so that the first is written before the limit
        # is set, and the second before it is lifted.
        if step in (3, 5):
            assert self._written.acquire(timeout=PATIENCE)
        limit = 40_000 if self.first <= step <= self.last else self._limits[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, self._limits[1]))

    @hookimpl
    def titan_train_end(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_loses_one_checkpoint_and_no_step(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    record = run({"checkpoint.keep_latest_k": 1, "checkpoint.async_mode": mode}, (FullDisk(4, 5, monkeypatch),))
    assert len(record.losses) == 6
    assert "checkpoint of step 4 cannot be written" in caplog.text
    assert "training continues; the newest checkpoint is of step 2" in caplog.text
    assert {path.name for path in CHECKPOINTS.iterdir()} == {"step-6"}
    (finding,) = (event for event in RunLog.read_events("outputs/tiny") if event["event"] == "finding")
    assert finding["kind"] == "checkpoint" and finding["message"].startswith("step 4 cannot be written (rank 0: ")


def test_a_full_disk_at_the_end_is_an_error_and_leaves_the_older_checkpoint(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(5, 6, monkeypatch)
    try:
        with pytest.raises(
            UserError, match=r"step-6: cannot be written .*; make space .*the newest checkpoint is of step 4"
        ):
            run({"checkpoint.keep_latest_k": 1}, (disk,))
    finally:
        disk.titan_train_end()
    assert {path.name for path in CHECKPOINTS.iterdir()} == {"step-4"}
    assert len(run().losses) == 2


def test_no_pickle_is_read_or_written(saved: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a checkpoint was unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    assert len(run().losses) == 2
    assert {file.name for file in (CHECKPOINTS / "step-6").iterdir()} == {"checkpoint.json", "data-00000.bin"}


def test_pinned_memory_without_a_gpu_is_refused(in_tmp: Path) -> None:
    with pytest.raises(UserError, match='pinned memory requires a CUDA device; set it to "async"'):
        run({"checkpoint.async_mode": "async_with_pinned_mem"})


def test_a_manifest_may_be_a_small_part_of_its_data(saved: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_ckpt.format.manifest.LONGEST", 100)
    folder = Folder(str(CHECKPOINTS / "step-4"))
    with pytest.raises(BrokenCheckpoint, match=r"checkpoint\.json cannot be read"):
        read_manifest(folder)
    data = CHECKPOINTS / "step-4/data-00000.bin"
    os.truncate(data, 256 * (folder.size("checkpoint.json") or 0))
    with pytest.raises(BrokenCheckpoint, match=r"data-00000\.bin has"):  # after the manifest was read
        read_manifest(folder)
