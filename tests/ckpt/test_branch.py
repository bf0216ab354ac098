"""A branch continues as the run that it was branched off, or as a run with its settings, and leaves that run as it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.resuming import run_in
from titan_ckpt.commands.branch import copy_checkpoint
from titan_ckpt.format.catalogue import entry
from titan_ckpt.format.folder import Folder
from titan_core.cli.main import main
from titan_core.toolkit.folder_lock import FolderLock
from titan_testing.jobs import RunRecord, run_recipe

RUN = "outputs/tiny"
PLATEAU: dict[str, object] = {"lr_scheduler.decay_ratio": 0.0}
DECAY: dict[str, object] = {"lr_scheduler.decay_ratio": 0.5}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord]:
    """A folder with a run of 8 steps, of which 3 and 6 are saved, and 8, without a decay."""
    folder, before = tmp_path_factory.mktemp("parent"), Path.cwd()
    try:
        return folder, run_in(str(folder), PLATEAU)
    finally:
        os.chdir(before)


@pytest.fixture
def whole(parent: tuple[Path, RunRecord], in_tmp: Path) -> RunRecord:
    shutil.copytree(parent[0], in_tmp, dirs_exist_ok=True)
    return parent[1]


def branch(*arguments: object) -> int:
    return main(["run", "branch", *map(str, arguments)])


def contents(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_branch_with_the_same_settings_is_bit_for_bit_equal(whole: RunRecord, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(RUN)
    with FolderLock(Path(RUN), "a job that runs"):
        assert branch(RUN, "--at", 3) == 0
    assert contents(RUN) == before
    assert "begins after step 3 of outputs/tiny, with the same settings" in capsys.readouterr().out
    (event,) = map(json.loads, Path("outputs/tiny-at-3/events.jsonl").read_text().splitlines())
    assert (event["event"], event["step"], event["parent"]) == ("branch", 3, "../tiny")
    shutil.rmtree(RUN)  # its checkpoint is the branch's own
    record = run_recipe("outputs/tiny-at-3/config.toml", {}, weights=True)
    assert record.losses == whole.losses[3:]
    assert record.grad_norms == whole.grad_norms[3:]
    assert all(tensor.equal(whole.final[name]) for name, tensor in record.final.items())
    assert len(Path("outputs/tiny-at-3/metrics.jsonl").read_text().splitlines()) > 0


def test_a_branch_with_another_schedule_equals_a_run_that_always_had_it(whole: RunRecord) -> None:
    """Both schedules agree until step 5. The branch stops after step 6, and resumes."""
    always = run_in(str(Path.cwd()), {**DECAY, "job.dump_folder": "always"})
    assert always.learning_rates[:4] == whole.learning_rates[:4]
    assert branch(RUN, "--at", 3, "--to", "decayed", "--lr_scheduler.decay_ratio", 0.5) == 0
    first = run_recipe("decayed/config.toml", {"training.stop_at_step": 6}, weights=True)
    second = run_recipe("decayed/config.toml", {"training.stop_at_step": "none"}, weights=True)
    assert first.learning_rates + second.learning_rates == always.learning_rates[3:]
    assert first.losses + second.losses == always.losses[3:]
    assert all(tensor.equal(always.final[name]) for name, tensor in second.final.items())


def test_a_branch_of_a_finished_or_stopped_run_trains_further(in_tmp: Path) -> None:
    run_in(str(in_tmp), {**PLATEAU, "training.steps": 4, "training.stop_at_step": 3})
    assert branch(RUN, "--at", 3, "--to", "longer", "--training.steps", 5, "--optimizer.lr", 1e-4) == 0
    record = run_recipe("longer/config.toml")
    assert record.learning_rates == [1e-4, 1e-4]


REFUSED: dict[str, tuple[list[object], str]] = {
    "not saved": ([RUN, "--at", 4], "--at 4: outputs/tiny/checkpoint has no checkpoint of this step; saved: 3, 6, 8;"),
    "no run": (["outputs", "--at", 3], "run 'outputs': has no config.toml; pass a run's directory"),
    "no folder": (["nothing", "--at", 3], "run 'nothing': no such directory"),
    "not new": ([RUN, "--at", 3, "--to", "outputs"], "outputs: already exists and is not empty; choose a new folder"),
    "nothing left": ([RUN, "--at", 8], "training.steps = 8: the branch begins after step 8, so there is nothing to train"),
    "stops before": ([RUN, "--at", 6, "--training.stop_at_step", 5], "training.stop_at_step = 5: the branch begins after"),
    "another step": ([RUN, "--at", 3, "--checkpoint.load_step", 6], "checkpoint.load_step: is set by `titan run branch`"),
    "folder twice": ([RUN, "--at", 3, "--job.dump_folder", "x"], "job.dump_folder: is set by `titan run branch`; use --to"),
    "full folder": ([RUN, "--at", 3, "--checkpoint.folder", "../tiny/checkpoint"], "is not empty: a branch needs a folder"),
    "bad setting": ([RUN, "--at", 3, "--training.step", 9], "training.step = 9: unknown key"),
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_run_can_begin_with_is_refused(whole: RunRecord, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, message = REFUSED[case]
    before = contents(".")
    assert branch(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert contents(".") == before


def test_a_checkpoint_of_weights_is_refused(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(str(in_tmp), {"training.steps": 2, "checkpoint.last_save_model_only": "true"})
    assert branch(RUN, "--at", 2, "--training.steps", 3) == 2
    assert "step-2: contains only weights" in capsys.readouterr().err
    assert branch(RUN, "--at", 1) == 2
    assert "it has none" in capsys.readouterr().err


def test_a_checkpoint_that_is_removed_meanwhile_leaves_no_branch(
    whole: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(source: Path, target: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", str(source))

    monkeypatch.setattr(os, "link", gone)
    assert branch(RUN, "--at", 3) == 2
    assert "step-3: was removed or changed while it was copied" in capsys.readouterr().err
    assert [path.name for path in Path("outputs").iterdir()] == ["tiny"]


@pytest.mark.parametrize("target", ["elsewhere/step-3", "memory://elsewhere/step-3"])
def test_a_copy_without_links_is_whole(whole: RunRecord, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    def other_file_system(*paths: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    source = entry(Folder(f"{RUN}/checkpoint/step-3"), 3)
    assert source.manifest is not None
    copy_checkpoint(source.folder, source.manifest, Folder(target))
    assert entry(Folder(target), 3).manifest == source.manifest
    assert Folder(target).list() == source.folder.list()
    assert all(Folder(target).read(name) == source.folder.read(name) for name in source.folder.list())
    Folder(target).remove_all()


def test_a_copy_takes_no_space(whole: RunRecord) -> None:
    assert branch(RUN, "--at", 6) == 0
    data = [Path(run, "checkpoint/step-6/data-00000.bin") for run in (RUN, "outputs/tiny-at-6")]
    assert data[0].samefile(data[1])
