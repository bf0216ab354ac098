"""What a link in a run's directory leads to is never written, moved or removed; nor is what Titan has not written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from titan_ckpt.format.folder import Folder
from titan_ckpt.format.new_folder import new_folder
from titan_ckpt.format.stored import UNFINISHED
from titan_ckpt.save.exports import Exports
from titan_ckpt.save.retention import make_room, remove
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.toolkit.own_files import remove_files, remove_tree
from titan_testing.jobs import run_recipe

TINY: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}",
    "training.seq_len": 16, "training.local_batch_size": 2, "training.steps": 4, "job.device": "cpu",
    "checkpoint.enable": "true", "checkpoint.interval": 1, "checkpoint.keep_latest_k": 2, "job.dump_folder": "run",
}  # fmt: skip
CHECKPOINTS = Path("run/checkpoint")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_recipe("tiny", {**TINY, "training.stop_at_step": 2, "job.dump_folder": folder})
    return folder


@pytest.fixture
def run(trained: Path, in_tmp: Path) -> Path:
    """The run, beside an archive of its step 1, and a folder that looks like an unfinished checkpoint."""
    shutil.copytree(trained, "run")
    shutil.copytree(CHECKPOINTS / "step-1", "archive")
    Path("archive/notes.txt").write_text("mine")
    for name in (UNFINISHED, "thesis.txt", "data/x"):
        (Path("mine") / name).parent.mkdir(parents=True, exist_ok=True)
        (Path("mine") / name).write_text(name)
    return in_tmp / "run"


@pytest.mark.parametrize("target", ["archive", "mine"])
def test_retention_does_not_follow_a_link(run: Path, target: str) -> None:
    before = contents(Path(target))
    shutil.rmtree(CHECKPOINTS / "step-1")
    (CHECKPOINTS / "step-1").symlink_to(Path(target).resolve())
    run_recipe("tiny", TINY)
    assert contents(Path(target)) == before
    assert {"step-3", "step-4"} <= set(os.listdir(CHECKPOINTS)) and not (CHECKPOINTS / "step-2").exists()


def test_the_command_removes_a_link_and_not_its_target(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(Path("archive"))
    shutil.rmtree(CHECKPOINTS / "step-1")
    (CHECKPOINTS / "step-1").symlink_to("../../archive")
    assert main(["checkpoint", "rm", "run", "--step", "1"]) == 0
    assert contents(Path("archive")) == before and not os.path.lexists(CHECKPOINTS / "step-1")
    shutil.move(CHECKPOINTS, "elsewhere")
    CHECKPOINTS.symlink_to("../elsewhere")
    before = contents(Path("elsewhere"))
    assert main(["checkpoint", "rm", "run", "--step", "2", "--force"]) == 2
    assert "is a link; name the folder that it leads to" in capsys.readouterr().err
    assert contents(Path("elsewhere")) == before


def test_a_link_is_moved_aside_for_a_new_checkpoint_of_its_step(run: Path) -> None:
    before = contents(Path("mine"))
    (CHECKPOINTS / "step-3").symlink_to("../../mine")
    run_recipe("tiny", TINY)
    assert contents(Path("mine")) == before and (CHECKPOINTS / "step-3.aside-1").is_symlink()
    assert (CHECKPOINTS / "step-3/checkpoint.json").is_file()


def test_what_titan_has_not_written_stays(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("notes.txt", "more/data-00000.bin"):
        (CHECKPOINTS / "step-1" / name).parent.mkdir(exist_ok=True)
        (CHECKPOINTS / "step-1" / name).write_text(name)
    (CHECKPOINTS / "step-1/data-00007.bin").symlink_to(Path("archive/notes.txt").resolve())
    run_recipe("tiny", TINY)
    assert set(contents(CHECKPOINTS / "step-1")) == {"notes.txt", "more/data-00000.bin"}
    assert Path("archive/notes.txt").read_text() == "mine"
    assert "step-1 is not empty: Titan has not written more, notes.txt" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint", ".lock", "debug/crash",
        *(pytest.param(name, marks=pytest.mark.full)
          for name in ("hf", "previous", "logs", "debug", "metrics.jsonl", "events.jsonl", "logs/rank-0.log")),
    ],
)  # fmt: skip
def test_a_directory_whose_own_names_lead_elsewhere_is_refused(run: Path, name: str) -> None:
    path, target = Path("run") / name, Path("elsewhere/target")
    if path.is_dir():
        shutil.copytree(path, target)
    target.mkdir(parents=True, exist_ok=True)
    (target / "mine").write_text('{"step": 9}\n{"half')
    before = contents(target)
    remove_tree(path)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to((target / "mine" if "." in name else target).resolve())
    with pytest.raises(UserError, match=r"is a link"):
        run_recipe("tiny", {**TINY, **({"checkpoint.export": "hf"} if name == "hf" else {})})
    assert contents(target) == before


def test_links_of_a_logger_are_no_obstacle(run: Path) -> None:
    """As W&B makes them in its folder, to a log in the user's cache."""
    (Path("run/logs/wandb/offline-run/logs")).mkdir(parents=True)
    Path("run/logs/wandb/offline-run/logs/debug-core.log").symlink_to(Path("archive/notes.txt").resolve())
    run_recipe("tiny", TINY)
    assert Path("archive/notes.txt").read_text() == "mine"


def test_an_export_that_is_a_link_is_unlinked(in_tmp: Path) -> None:
    Path("target").mkdir()
    Path("target/model.safetensors").write_text("mine")
    for name in ("step-1", "step-2.partial", "step-3.removed"):
        (in_tmp / name).symlink_to("target")
    exports = object.__new__(Exports)
    exports.folder = in_tmp
    exports.discard(1)
    exports._remove_leftovers()
    assert contents(Path("target")) == {"model.safetensors": b"mine"} and sorted(os.listdir()) == ["target"]


def test_a_folder_that_no_command_has_left_is_not_removed(in_tmp: Path) -> None:
    Path("new.partial").mkdir()
    Path("new.partial/thesis.txt").touch()
    with pytest.raises(UserError, match="in the way, and not left by an interrupted command"), new_folder(Path("new")):
        pass
    assert Path("new.partial/thesis.txt").exists()
    Path(".new.lock").touch()  # of a command that was killed
    with new_folder(Path("new")) as partial:
        assert not (partial / "thesis.txt").exists()
        shutil.copytree(partial, "copy.partial")  # what a kill leaves if its lock file is removed
    assert Path("new").is_dir() and not any(Path("new").iterdir()) and not Path("new.partial").exists()
    with new_folder(Path("copy")):
        pass
    assert sorted(os.listdir()) == ["copy", "new"]


def test_a_link_that_takes_the_place_of_a_folder_meanwhile(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is listed, and before its files are removed it becomes a link."""
    for folder in ("step-1", "target"):
        Path(folder).mkdir()
        for name in ("checkpoint.json", "data-00000.bin", UNFINISHED):
            (Path(folder) / name).write_text(folder)
    before, names = contents(Path("target")), Folder.list

    def swapped(folder: Folder) -> list[str]:
        found = names(folder)
        Path("step-1").rename("away")
        Path("step-1").symlink_to("target")
        return found

    monkeypatch.setattr(Folder, "list", swapped)
    with pytest.raises(OSError, match=r"(?i)link|directory"):
        remove(Folder(str(in_tmp)), 1)
    assert contents(Path("target")) == before


def test_removing_follows_no_link(in_tmp: Path) -> None:
    Path("target").mkdir()
    Path("target/x").touch()
    Path("tree/deep").mkdir(parents=True)
    for link in ("tree/deep/link", "link"):
        Path(link).symlink_to(Path("target").resolve())
    remove_tree(Path("tree"))
    with pytest.raises(OSError, match=r"(?i)link|directory"):
        remove_files(Path("link"), ["x"])
    remove_tree(Path("link"))
    remove_tree(Path("nothing"))
    assert sorted(os.listdir()) == ["target"] and Path("target/x").exists()
    assert make_room(Folder(str(in_tmp)), 7) is None
