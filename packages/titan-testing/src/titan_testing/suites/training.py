"""The suites of what a step computes and updates: objective, optimizer, learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from titan_core.api import LRSchedule, Objective, Optimizer
from titan_testing.jobs import RunRecord
from titan_testing.meshes import Case
from titan_testing.pytest_plugin import RunJob
from titan_testing.settings import selecting
from titan_testing.suites.base import MESHES, PARALLEL, Suite, require, saving_in

CHUNKS = {"objective.chunk_tokens": 20}


class ObjectiveSuite(Suite):
    """Tests of an objective: its sharded and chunked forms are the plain one."""

    objective: ClassVar[str]
    """Name of the objective, as in ``objective.name``."""
    meshes = ("FSDP 2", "TP 2", "TP 2, no loss parallelism", "PP 2, 1F1B", "CP 2", "TP x CP")

    def job(self) -> dict[str, object]:
        """See :class:`Suite`."""
        return {**selecting(Objective, self.objective), **self.settings}

    def test_mesh(self, row: Case, run_job: RunJob) -> None:
        """Losses and gradients are those of one device."""
        self.require_equal_on(row, run_job)

    def test_chunks(self, row: Case, run_job: RunJob) -> None:
        """Chunks of the loss add up to the whole loss, on a mesh too."""
        require(row.needs)
        if row.name in self.unsupported:
            # There is no loss to compare: the job is refused before step 1.
            pytest.skip("test_mesh shows that Titan refuses this mesh")
        found = run_job(self.recipe, {**self.job(), **row.overrides, **CHUNKS}, world_size=row.ranks)
        self.require_equal_records(found, run_job(self.recipe, self.job()))

    def test_it_learns(self, run_job: RunJob) -> None:
        """Losses are finite, and fall."""
        losses = run_job(self.recipe, {**self.job(), "training.steps": 20}).losses
        assert all(map(math.isfinite, losses))
        assert sum(losses[-5:]) < sum(losses[:5])


class OptimizerSuite(Suite):
    """Tests of an optimizer: its updates are those of one device, and its state survives a stop."""

    optimizer: ClassVar[str]
    """Name of the optimizer, as in ``optimizer.name``."""
    weights: ClassVar[float] = 1e-4
    """Largest difference of a parameter's final values from one device's, relative to their norm."""

    def require_equal_records(self, found: RunRecord, one: RunRecord) -> None:
        """See :class:`Suite`."""
        super().require_equal_records(found, one)
        for name, tensor in one.final.items():
            assert (found.final[name] - tensor).norm() <= self.weights * tensor.norm(), f"{name} ends with other values"

    def job(self) -> dict[str, object]:
        """See :class:`Suite`."""
        return {**selecting(Optimizer, self.optimizer), **self.settings}

    def test_it_learns(self, run_job: RunJob) -> None:
        """Losses fall, and every parameter changes."""
        record = run_job(self.recipe, {**self.job(), "training.steps": 20})
        assert sum(record.losses[-5:]) < sum(record.losses[:5])
        same = [name for name, tensor in record.final.items() if tensor.equal(record.initial[name])]
        assert not same, f"these parameters have not changed: {', '.join(same)}"

    def test_mesh(self, row: Case, run_job: RunJob) -> None:
        """Updates are those of one device, however the parameters are sharded."""
        self.require_equal_on(row, run_job)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_resumed(self, ranks: int, run_job: RunJob, tmp_path: Path) -> None:
        """A stopped run continues bitwise as one that never stopped."""
        require(["titan-ckpt", *(MESHES["FSDP 2"].needs if ranks > 1 else ())])
        saved = {**self.job(), **saving_in(tmp_path / "run")}
        run_job(self.recipe, {**saved, "training.stop_at_step": 2}, world_size=ranks)
        resumed = run_job(self.recipe, saved, world_size=ranks)
        whole = run_job(self.recipe, self.job(), world_size=ranks)
        assert resumed.losses == whole.losses[2:]
        for name, tensor in whole.final.items():
            assert resumed.final[name].equal(tensor), f"{name} ends with other values after a stop"

    def test_resumed_elsewhere(self, run_job: RunJob, tmp_path: Path) -> None:
        """The state that two ranks save is loaded by one, and by two that shard it otherwise."""
        require(["titan-ckpt", PARALLEL])
        saved = {**self.job(), **saving_in(tmp_path / "run")}
        run_job(self.recipe, {**saved, "training.stop_at_step": 2}, world_size=2)
        whole = run_job(self.recipe, self.job())
        for ranks, overrides in ((1, {}), (MESHES["TP 2"].ranks, MESHES["TP 2"].overrides)):
            resumed = run_job(self.recipe, {**saved, **overrides, "checkpoint.load_step": 2}, world_size=ranks)
            assert resumed.losses == pytest.approx(whole.losses[2:], rel=self.loss)


class ScheduleSuite(Suite):
    """Tests of a learning-rate schedule."""

    schedule: ClassVar[str]
    """Name of the schedule, as in ``lr_scheduler.name``."""
    steps: ClassVar[int] = 12
    """Number of steps of each job; at least 5."""
    expected: ClassVar[Mapping[int, float]] = {}
    """Step, counted from 1 -> learning rate, computed by hand."""

    def job(self) -> dict[str, object]:
        """See :class:`Suite`."""
        return {**selecting(LRSchedule, self.schedule), "training.steps": self.steps, **self.settings}

    def test_learning_rates(self, run_job: RunJob) -> None:
        """Learning rates are finite, at least 0, and those expected."""
        rates = run_job(self.recipe, self.job()).learning_rates
        assert len(rates) == self.steps
        assert all(0 <= rate < math.inf for rate in rates)
        assert {step: rates[step - 1] for step in self.expected} == pytest.approx(dict(self.expected))

    def test_resumed(self, run_job: RunJob, tmp_path: Path) -> None:
        """A stopped run continues with the learning rates of one that never stopped."""
        require(["titan-ckpt"])
        saved = {**self.job(), **saving_in(tmp_path / "run")}
        run_job(self.recipe, {**saved, "training.stop_at_step": 4})
        assert run_job(self.recipe, saved).learning_rates == run_job(self.recipe, self.job()).learning_rates[4:]
