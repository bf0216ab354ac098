"""A fresh start does not move the files of a run of another recipe or model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.runlog.run_directory import RunDirectory
from titan_testing.jobs import TINY, make_job, run_recipe

TABLES = '[model]\nname = "tiny"\n[training]\nseq_len = 32\n[lr_scheduler]\nwarmup_steps = 2\n'


def first_run(recipe: str, overrides: dict[str, object] | None = None, folder: str = "outputs/my") -> Path:
    """Leave the files of a run of ``recipe`` that took one step; return its directory."""
    run_recipe(recipe, {**TINY, "training.steps": 1, "job.dump_folder": folder, **(overrides or {})})
    return Path(folder)


def fresh_start(recipe: str, overrides: dict[str, object] | None = None) -> None:
    job = make_job(recipe, {**TINY, "job.dump_folder": "outputs/my", **(overrides or {})})
    RunDirectory(Path("outputs/my")).begin(job, step=0)


def _edited_copy() -> None:
    Path("copies").mkdir()
    Path("copies/my.toml").write_text(TABLES + "[optimizer]\nlr = 1e-4\n")


OTHERS: dict[str, tuple[str, str, dict[str, object], str]] = {
    "a file of the same name": ("my.toml", "copies/my.toml", {}, r"another recipe \(my\.toml\)"),
    "a copy of a plugin's recipe": ("tiny", "my.toml", {}, r"another recipe \(tiny\)"),
    "a plugin's recipe": ("my.toml", "tiny", {}, r"another recipe \(my\.toml\)"),
    "other arguments": ("my.toml", "my.toml", {"model.args.n_layers": 3}, r"another model \(args = \{.*n_layers = 2"),
}


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(("before", "now", "changes", "message"), OTHERS.values(), ids=OTHERS)
def test_a_fresh_start_refuses_to_move_another_run(
    in_tmp: Path, before: str, now: str, changes: dict[str, object], message: str
) -> None:
    Path("my.toml").write_text(TABLES)
    _edited_copy()
    folder = first_run(before)
    files = {file: file.read_bytes() for file in folder.iterdir()}
    refusal = rf"job\.dump_folder = \"outputs/my\": contains a run of {message}.*--job\.dump_folder outputs/my-2"
    with pytest.raises(UserError, match=refusal):
        fresh_start(now, changes)  # as after an attempt to restore a checkpoint
    with pytest.raises(UserError, match=refusal):
        run_recipe(now, {**TINY, "job.dump_folder": "outputs/my", **changes})
    assert {file: file.read_bytes() for file in folder.iterdir()} == files


def _edit_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my.toml").write_text(TABLES + "[optimizer]\nlr = 1e-4\n")


def _move_with_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("project").mkdir()
    for name in ("my.toml", "outputs"):
        Path(name).rename(Path("project") / name)
    monkeypatch.chdir("project")


@pytest.mark.parametrize("change", [None, _edit_in_place, _move_with_its_recipe])
def test_a_fresh_start_of_the_same_recipe_moves_its_run_and_logs_it(
    in_tmp: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    Path("my.toml").write_text(TABLES)
    folder = first_run("my.toml")
    metrics = (folder / "metrics.jsonl").read_bytes()
    if change is not None:
        change(monkeypatch)
    with caplog.at_level(logging.INFO, logger="titan_core.runlog"):
        fresh_start("my.toml", {"training.steps": 3})
    assert (folder / "previous/1/metrics.jsonl").read_bytes() == metrics
    assert "moved the files of the earlier run in outputs/my to outputs/my/previous/1" in caplog.text


def test_a_run_may_be_repeated_from_its_own_config(in_tmp: Path) -> None:
    Path("my.toml").write_text(TABLES)
    folder = first_run("my.toml")
    fresh_start(str(folder / "config.toml"))
    assert (folder / "previous/1/events.jsonl").exists()


def test_the_fix_names_a_folder_for_any_directory(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my.toml").write_text(TABLES)
    first_run("my.toml", folder="run")
    monkeypatch.chdir("run")
    for folder in (".", "../run", str(in_tmp / "run")):
        with pytest.raises(UserError, match=r"another recipe \(\.\./my\.toml\); add --job\.dump_folder \S*run-2, or"):
            RunDirectory(Path(folder)).begin(make_job("tiny", {**TINY, "job.dump_folder": folder}), step=0)


def test_a_resumed_run_may_come_from_another_file_and_logs_it(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("my.toml").write_text(TABLES)
    _edited_copy()
    folder = first_run("my.toml")
    RunDirectory(folder).begin(make_job("my.toml", {**TINY, "job.dump_folder": "outputs/my"}), step=1)
    assert "another recipe" not in caplog.text
    RunDirectory(folder).begin(make_job("copies/my.toml", {**TINY, "job.dump_folder": "outputs/my"}), step=1)
    assert (folder / "metrics.jsonl").exists()
    assert "outputs/my contains a run of another recipe (my.toml), which continues with copies/my.toml" in caplog.text


def test_the_start_event_names_the_recipe_by_a_path_that_moves_with_the_run(in_tmp: Path) -> None:
    Path("my.toml").write_text(TABLES)
    for recipe, recorded in (("my.toml", "../../my.toml"), (str(in_tmp / "my.toml"), "../../my.toml"), ("tiny", "tiny")):
        folder = first_run(recipe, folder=f"outputs/{len(recipe)}")
        assert json.loads((folder / "events.jsonl").read_text().splitlines()[0])["recipe"] == recorded
