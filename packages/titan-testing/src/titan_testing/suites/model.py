"""The suite of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from titan_core.api import Model, UserError
from titan_core.cli.main import main
from titan_testing.checks import NotTried
from titan_testing.checks.formats import (
    LARGE_UPDATES,
    check_exported,
    check_formats,
    check_read_elsewhere,
    exported_format,
    read_by_transformers,
)
from titan_testing.checks.model import CHECKS, has_experts
from titan_testing.jobs import make_job
from titan_testing.meshes import EXPERT_CASES, Case, require_equal
from titan_testing.pytest_plugin import RunJob
from titan_testing.settings import inline, selecting
from titan_testing.suites.base import MESHES, PARALLEL, Suite, require, saving_in

_MODE = "activation_checkpoint.mode"
TECHNIQUES = {
    case.name: case
    for case in (
        Case("full recomputation", 1, {_MODE: "full"}),
        Case("selective recomputation", 1, {_MODE: "selective"}),
        Case("FSDP 2, selective recomputation", 2, {_MODE: "selective"}),
        Case("compile", 1, {"compile.enable": "true"}),
    )
}
"""Techniques that change how a model is computed, and no result."""
_RESUMED = ("FSDP 2", "TP 2", "PP 2, 1F1B")
FLOAT8 = {"float8.enable": "true", "float8.emulate": "true", "float8.filter_fqns": "[]"}


class ModelSuite(Suite):
    """Tests of a model, given its name and the smallest arguments with at least two blocks."""

    model: ClassVar[str]
    """Name of the model, as in ``model.name``."""
    flavor: ClassVar[str] = ""
    """Name of its flavor; empty: :attr:`args` describes the whole model."""
    args: ClassVar[Mapping[str, Any]] = {}
    """Arguments in place of the flavor's."""

    def rows(self, test: str) -> Mapping[str, Any]:
        """See :class:`Suite`."""
        tables: dict[str, Mapping[str, Any]] = {
            "test_check": CHECKS,
            "test_technique": TECHNIQUES,
            "test_experts": {case.name: case for case in EXPERT_CASES},
            "test_resumed_elsewhere": {
                name: MESHES[name] for name in ("FSDP 2", "TP 2", "PP 2, 1F1B") if name in self.meshes
            },
        }
        return tables.get(test) or super().rows(test)

    def job(self) -> dict[str, object]:
        """See :class:`Suite`."""
        return {**selecting(Model, self.model, flavor=self.flavor, args=inline(self.args)), **self.settings}

    def test_check(self, row: Any) -> None:
        """The layout and the definition describe what the model computes (:mod:`titan_testing.checks.model`)."""
        job = make_job(self.recipe, self.job(), world_size=1)
        if row is check_formats and (pattern := self.unsupported.get("weight formats")):
            with pytest.raises(UserError, match=pattern):
                row(job)
            return
        row(job)

    def test_mesh(self, row: Case, run_job: RunJob) -> None:
        """Initial weights, losses, norms and every gradient are those of one device."""
        self.require_equal_on(row, run_job)

    def test_experts(self, row: Case, run_job: RunJob) -> None:
        """With its experts divided over ranks too, a model trains as on one device; one without experts is refused."""
        require(row.needs)
        if not has_experts(make_job(self.recipe, self.job(), world_size=1)):
            with pytest.raises(UserError, match="has no experts that can be divided"):
                make_job(self.recipe, {**self.job(), **row.overrides}, row.ranks)
            return
        self.require_equal_on(row, run_job)

    def test_technique(self, row: Case, run_job: RunJob) -> None:
        """Recomputation and compilation change nothing."""
        self.require_equal_on(row, run_job)

    def test_packed_documents(self, run_job: RunJob) -> None:
        """With masks of documents too, a mesh gives the results of one device; without support, the job is refused."""
        masked = {"data.document_mask": "true"}
        if not make_job(self.recipe, self.job(), world_size=1).model.layout.masks_documents:
            with pytest.raises(RuntimeError, match="cannot confine attention"):
                run_job(self.recipe, {**self.job(), **masked})
            return
        self.require_equal_on(MESHES["FSDP 2"], run_job, masked)

    def test_float8(self, run_job: RunJob) -> None:
        """Emulated float8 trains on a mesh as on one device, to the roundings of float8."""
        require([PARALLEL, "titan-float8"])
        settings = {**self.job(), **FLOAT8}
        if "float8" in self.unsupported:
            self.require_refused("float8", run_job, settings, 1)
            return
        one, mesh = run_job(self.recipe, settings), MESHES["FSDP 2"]
        require_equal([run_job(self.recipe, {**settings, **mesh.overrides}, world_size=mesh.ranks)], one, 1e-3, 5e-2)

    def test_resumed_elsewhere(self, row: Case, run_job: RunJob, tmp_path: Path) -> None:
        """A run that is saved on a mesh continues on one device as if it had never stopped."""
        require([*row.needs, "titan-ckpt"])
        if row.name in self.unsupported:
            # There is no run to resume: the job is refused before step 1.
            pytest.skip("test_mesh shows that Titan refuses this mesh")
        saved = {**self.job(), **saving_in(tmp_path / "run")}
        run_job(self.recipe, {**saved, **row.overrides, "training.stop_at_step": 2}, world_size=row.ranks)
        resumed = run_job(self.recipe, saved)
        whole = run_job(self.recipe, self.job())
        assert resumed.losses == pytest.approx(whole.losses[2:], rel=self.loss)

    def test_generation(self, run_job: RunJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """``titan generate`` chooses the same tokens with its cache and without."""
        require(["titan-ckpt", "titan-inference"])
        run_job(self.recipe, {**self.job(), **LARGE_UPDATES, "job.dump_folder": str(tmp_path / "run")})
        greedy = ["--prompt", "def f(", "--temperature", "0", "--max-new-tokens", "16", "--ignore-end", "--json"]
        command = ["generate", str(tmp_path / "run"), *greedy, "--job.device", "cpu"]
        capsys.readouterr()
        if "generation" in self.unsupported:
            assert main(command) == 2
            assert re.search(self.unsupported["generation"], capsys.readouterr().err)
            return
        tokens = []
        for cache in ([], ["--no-cache"]):
            assert main([*command, *cache]) == 0
            tokens.append(json.loads(capsys.readouterr().out)["tokens"])
        assert tokens[0] == tokens[1], "the cache changes the tokens"
        assert len(tokens[0]) == 16

    def test_written_and_read_again(self, run_job: RunJob, tmp_path: Path) -> None:
        """Exported weights are read again as they were."""
        run = self._saved(run_job, tmp_path)
        if pattern := self.unsupported.get("weight formats"):
            with pytest.raises(UserError, match=pattern):
                check_exported(self.recipe, self.job(), run, tmp_path / "exported")
            return
        check_exported(self.recipe, self.job(), run, tmp_path / "exported")

    def test_read_elsewhere(self, run_job: RunJob, tmp_path: Path) -> None:
        """Another reader of exported weights, :meth:`logits_elsewhere`, computes the same logits."""
        if "weight formats" in self.unsupported:
            # There is nothing to read.
            pytest.skip("test_written_and_read_again shows that Titan refuses to export this model")
        run, exported = self._saved(run_job, tmp_path), tmp_path / "exported"
        check_exported(self.recipe, self.job(), run, exported)
        try:
            check_read_elsewhere(self.recipe, self.job(), run, exported, self.logits_elsewhere)
        except NotTried as error:
            # Nothing else can find a tensor that the format transposes, or exchanges with another, both ways.
            pytest.skip(f"{error}; override logits_elsewhere")

    def logits_elsewhere(self, exported: Path, tokens: Tensor) -> Tensor:
        """Return the logits that code which shares nothing with the format computes from exported weights: by default, the
        class of transformers that ``config.json`` names.

        Raises:
            NotTried: there is no such reader.
        """
        return read_by_transformers(exported, tokens)

    def _saved(self, run_job: RunJob, tmp_path: Path) -> Path:
        """Return the folder of a run with a checkpoint that can be exported."""
        if exported_format(make_job(self.recipe, self.job(), world_size=1).family) is None:
            # Nothing can be exported, and titan checkpoint convert says so.
            pytest.skip("the model declares no format of safetensors that can be written")
        require(["titan-ckpt"])
        run_job(self.recipe, {**self.job(), **LARGE_UPDATES, "job.dump_folder": str(tmp_path / "run")})
        return tmp_path / "run"
