"""Runs in child processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.runs.child_runs import ChildRun


def test_the_directory_of_a_running_job_is_not_moved(in_tmp: Path) -> None:
    with FolderLock(in_tmp / "run", "it"), pytest.raises(UserError, match="run 'run': process"):
        ChildRun("tiny", [], 1, Path("run")).train()
    assert (in_tmp / "run").is_dir()
