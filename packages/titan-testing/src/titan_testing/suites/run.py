"""The suites of what accompanies a run: observers and metric loggers, checkpoints, commands."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from titan_core.toolkit.processes import python
from titan_testing.jobs import RunRecord, make_job
from titan_testing.meshes import Case
from titan_testing.pytest_plugin import RunJob
from titan_testing.suites.base import Suite, require


class ObserverSuite(Suite):
    """Tests of an observer or a metric logger, given the overrides that switch it on. Override :meth:`require_seen` to look
    at what it has written."""

    switched_on: ClassVar[Mapping[str, object]]
    """Overrides, such as ``{"my_debugger.limit": 1.0}``."""
    meshes = ("FSDP 2", "TP 2", "PP 2, 1F1B")

    def test_it_takes_part(self) -> None:
        """The overrides switch an observer on that is off without them."""
        on, off = (make_job(self.recipe, {**self.job(), **more}, world_size=1) for more in (self.switched_on, {}))
        assert {one.name for one in on.observers} - {one.name for one in off.observers}, "no observer became active"

    def test_it_changes_nothing(self, run_job: RunJob, tmp_path: Path) -> None:
        """Losses, norms and weights are bitwise those of a run without it."""
        folder = {"job.dump_folder": str(tmp_path / "run")}
        watched = run_job(self.recipe, {**self.job(), **self.switched_on, **folder})
        _require_same(watched, run_job(self.recipe, self.job()))
        self.require_seen(tmp_path / "run")

    def test_mesh(self, row: Case, run_job: RunJob) -> None:
        """On several ranks too, the run is that without it, bitwise."""
        require(row.needs)
        watched = run_job(self.recipe, {**self.job(), **row.overrides, **self.switched_on}, world_size=row.ranks)
        _require_same(watched, run_job(self.recipe, {**self.job(), **row.overrides}, world_size=row.ranks))

    def require_seen(self, run: Path) -> None:
        """Assert that it did its work. By default, nothing is required.

        Args:
            run: the directory of a finished run.
        """


def _require_same(watched: RunRecord, alone: RunRecord) -> None:
    """Assert that two runs are bitwise the same."""
    assert (watched.losses, watched.grad_norms) == (alone.losses, alone.grad_norms)
    for found, expected in ((watched.gradients, alone.gradients), (watched.final, alone.final)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].equal(tensor), f"{name} has other values, or another gradient"


class CheckpointSuite(Suite):
    """Tests of a checkpoint format, given the overrides that make a run save."""

    saves: ClassVar[Mapping[str, object]]
    """Overrides that save after step 2 at the latest, in the run's directory."""
    meshes = ("FSDP 2", "TP 2", "PP 2, 1F1B")

    def test_resumed_bitwise(self, run_job: RunJob, tmp_path: Path) -> None:
        """A stopped run continues as one that never stopped: weights, optimizer, schedule and data."""
        saved = {**self.job(), **self.saves, "job.dump_folder": str(tmp_path / "run")}
        run_job(self.recipe, {**saved, "training.stop_at_step": 2})
        resumed, whole = run_job(self.recipe, saved), run_job(self.recipe, self.job())
        assert resumed.losses == whole.losses[2:]
        for name, tensor in whole.final.items():
            assert resumed.final[name].equal(tensor), f"{name} ends with other values after a stop"

    def test_mesh(self, row: Case, run_job: RunJob, tmp_path: Path) -> None:
        """A run that is saved on a mesh continues on one device."""
        require(row.needs)
        saved = {**self.job(), **self.saves, "job.dump_folder": str(tmp_path / "run")}
        run_job(self.recipe, {**saved, **row.overrides, "training.stop_at_step": 2}, world_size=row.ranks)
        if row.name in self.unsupported:
            self.require_refused(row.name, run_job, saved, 1)
            return
        whole = run_job(self.recipe, self.job())
        assert run_job(self.recipe, saved).losses == pytest.approx(whole.losses[2:], rel=self.loss)


class CommandSuite:
    """Tests of a subcommand of ``titan``."""

    command: ClassVar[str]
    """The words after ``titan``, such as ``"config show"``."""
    works: ClassVar[Sequence[Sequence[str]]] = ()
    """Arguments with which it succeeds."""
    refused: ClassVar[Sequence[Sequence[str]]] = (("--no-such-option",),)
    """Arguments that are a user's mistake."""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command in a process of its own."""
        command = python("-m", "titan_core", *self.command.split(), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_help(self) -> None:
        """``--help`` describes it."""
        done = self.run("--help")
        assert done.returncode == 0, done.stderr
        assert self.command in done.stdout

    def test_it_works(self) -> None:
        """It succeeds with the arguments of :attr:`works`."""
        for arguments in self.works:
            done = self.run(*arguments)
            assert done.returncode == 0, done.stdout + done.stderr

    def test_mistakes_are_one_error(self) -> None:
        """A user's mistake ends with a status and an error, and no traceback."""
        for arguments in self.refused:
            done = self.run(*arguments)
            assert done.returncode, f"{arguments} is accepted"
            assert done.stderr and "Traceback" not in done.stderr, done.stderr
