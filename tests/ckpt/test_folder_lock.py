"""A job locks its run directory and its checkpoint folder against other jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan_core.api import UserError, hookimpl
from titan_core.toolkit.folder_lock import FolderLock
from titan_testing.jobs import TINY, run_recipe


def lock(folder: Path) -> FolderLock:
    return FolderLock(folder, "job.dump_folder = 'x'")


class AfterFirstStep:
    """Calls a function at the end of the first step."""

    def __init__(self, function: object) -> None:
        self.function = function

    @hookimpl
    def titan_step_end(self) -> None:
        function, self.function = self.function, None
        if callable(function):
            function()


def test_a_job_locks_its_directory_and_a_local_checkpoint_folder(in_tmp: Path) -> None:
    elsewhere = in_tmp / "kept"
    shared: dict[str, object] = {**TINY, "checkpoint.enable": "true", "checkpoint.folder": str(elsewhere)}

    def require_locked() -> None:
        for folder in (in_tmp / "one", elsewhere):
            with pytest.raises(UserError), lock(folder):
                pass

    one = {**shared, "job.dump_folder": "one"}
    assert len(run_recipe("tiny", one, observers=[AfterFirstStep(require_locked)]).losses) == 4
    assert not list(in_tmp.rglob(".lock"))
    with lock(elsewhere), pytest.raises(UserError, match=f"checkpoints in {elsewhere}: process {os.getpid()}"):
        run_recipe("tiny", {**shared, "job.dump_folder": "two"})


def test_a_run_that_fails_while_it_is_built_releases_its_locks(in_tmp: Path) -> None:
    broken: dict[str, object] = {**TINY, "checkpoint.enable": "true", "optimizer.param_groups": '[{pattern = "nothing"}]'}
    with pytest.raises(UserError, match="matches no parameter"):
        run_recipe("tiny", broken)
    assert len(run_recipe("tiny", {**TINY, "checkpoint.enable": "true"}).losses) == 4
