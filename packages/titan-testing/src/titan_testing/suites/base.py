"""The base of all suites: runs jobs of a row of a table, and compares them with one device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from titan_testing.jobs import RunRecord
from titan_testing.meshes import CASES, NEARLY_ZERO, Case, require_equal
from titan_testing.pytest_plugin import RunJob
from titan_testing.settings import RECIPE, SMALL, is_usable

MESHES: Mapping[str, Case] = {case.name: case for case in CASES}
ONE_OF_EACH = ("DDP 2", "FSDP 2", "HSDP 2x2", "TP 2", "TP 2, no SP", "PP 2, 1F1B", "CP 2", "FSDP x TP", "TP x CP")
"""The meshes that suites try unless they say otherwise."""
PARALLEL = "titan-parallel"


class Suite:
    """The base of all suites."""

    recipe: ClassVar[str] = RECIPE
    """The recipe of all jobs: its name, or the path of a TOML file."""
    settings: ClassVar[Mapping[str, object]] = {}
    """Overrides of all jobs of the suite."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Row -> regular expression of the error with which Titan refuses it."""
    meshes: ClassVar[Iterable[str]] = ONE_OF_EACH
    """Names of rows of :data:`titan_testing.meshes.CASES`."""
    loss: ClassVar[float] = 1e-5
    """Largest relative difference of a loss from one device's; ten times as much of a gradient norm."""
    gradient: ClassVar[float] = 1e-5
    """Largest difference of a parameter's gradient in step 1, relative to its norm."""

    def rows(self, test: str) -> Mapping[str, Any]:
        """Return the rows of the table of a test by name."""
        return {name: MESHES[name] for name in self.meshes}

    def job(self) -> dict[str, object]:
        """Return the overrides of :attr:`recipe` that all jobs of the suite have."""
        return {**SMALL, **self.settings}

    def require_equal_on(self, row: Case, run_job: RunJob, more: Mapping[str, object] | None = None) -> None:
        """Assert that the job on the mesh of ``row`` equals the same job on one device, or is refused if it is
        :attr:`unsupported`."""
        require(row.needs)
        settings = {**self.job(), **(more or {})}
        on_mesh = {**settings, **row.overrides}
        if row.name in self.unsupported:
            self.require_refused(row.name, run_job, on_mesh, row.ranks)
            return
        one = run_job(self.recipe, settings)
        self.require_equal_records(run_job(self.recipe, on_mesh, world_size=row.ranks), one)

    def require_equal_records(self, found: RunRecord, one: RunRecord) -> None:
        """Assert that a run equals one on one device, within the suite's tolerances."""
        require_equal([found], one, self.loss, self.gradient, NEARLY_ZERO)

    def require_refused(self, row: str, run_job: RunJob, settings: Mapping[str, object], ranks: int) -> None:
        """Assert that Titan refuses a job, with one error that matches the row's pattern."""
        with pytest.raises(RuntimeError) as refused:
            run_job(self.recipe, settings, world_size=ranks)
        text = str(refused.value)
        assert "UserError" in text or "PluginFailure" in text, f"{row} fails without being refused:\n{text}"
        assert re.search(self.unsupported[row], text), f"{row} is refused with another error:\n{text}"


def saving_in(folder: Path) -> dict[str, object]:
    """Return the overrides of a run in ``folder`` that saves every second step."""
    return {"checkpoint.enable": "true", "checkpoint.interval": 2, "job.dump_folder": str(folder)}


def require(distributions: Iterable[str]) -> None:
    """Skip the test if a distribution is missing."""
    if missing := [name for name in distributions if not is_usable(name)]:
        # An author installs only what the plugin needs, and the row is about another package.
        pytest.skip(f"needs {', '.join(missing)}, whose plugin is not installed or switched off")
