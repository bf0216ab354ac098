"""Folders named by the config are in the run's directory, and move to ``previous/`` with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.runlog.run_directory import RunDirectory
from titan_testing.jobs import make_job


def test_folders_that_the_config_names_belong_to_the_run(tmp_path: Path) -> None:
    job = make_job("llama3_debug", {"metrics.save_tb_folder": "tb/mine", "profiling.save_traces_folder": "traces"})
    for name in ("tb/mine/events", "tb/yours", "traces/step-1", "checkpoint/step-1", "debug/flight/rank-0.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    RunDirectory(tmp_path).begin(job, step=0)
    moved = {str(one.relative_to(tmp_path / "previous/1")) for one in (tmp_path / "previous/1").rglob("*") if one.is_file()}
    assert moved == {"tb/mine/events", "traces/step-1", "debug/flight/rank-0.json"}


@pytest.mark.parametrize("folder", ["/tmp/mine", "../mine", "a/../../b", "", ".", "previous", "previous/1"])
def test_a_folder_outside_of_the_run_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match=r"must (be a folder below the run's directory|not be in 'previous')"):
        make_job("llama3_debug", {"metrics.save_tb_folder": repr(folder)})
