"""A job is the only writer of its folder for checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.jobs import TINY, run_recipe
from titan_core.api.errors import UserError
from titan_core.api.hookspecs import hookimpl
from titan_core.api.runs.folder_lock import FolderLock


def lock(folder: Path) -> FolderLock:
    return FolderLock(folder, "job.dump_folder = 'x'")


class Meanwhile:
    """Does something during the first step."""

    def __init__(self, act: object) -> None:
        self.act = act

    @hookimpl
    def titan_step_end(self) -> None:
        act, self.act = self.act, None
        if callable(act):
            act()


def test_a_job_holds_its_folder_and_a_local_one_for_checkpoints(in_tmp: Path) -> None:
    elsewhere = in_tmp / "kept"
    shared: dict[str, object] = {**TINY, "checkpoint.enable": "true", "checkpoint.folder": str(elsewhere)}

    def others_are_refused() -> None:
        for folder in (in_tmp / "one", elsewhere):
            with pytest.raises(UserError), lock(folder):
                pass

    one = {**shared, "job.dump_folder": "one"}
    assert len(run_recipe("tiny", one, observers=[Meanwhile(others_are_refused)]).losses) == 4
    assert not list(in_tmp.rglob(".lock"))
    with lock(elsewhere), pytest.raises(UserError, match=f"checkpoints in {elsewhere}: process {os.getpid()}"):
        run_recipe("tiny", {**shared, "job.dump_folder": "two"})


def test_a_run_that_fails_while_it_is_built_holds_nothing(in_tmp: Path) -> None:
    broken: dict[str, object] = {**TINY, "checkpoint.enable": "true", "optimizer.param_groups": '[{pattern = "nothing"}]'}
    with pytest.raises(UserError, match="matches no parameter"):
        run_recipe("tiny", broken)
    assert len(run_recipe("tiny", {**TINY, "checkpoint.enable": "true"}).losses) == 4
