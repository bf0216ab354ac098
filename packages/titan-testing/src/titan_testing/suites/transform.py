"""The suites of transforms: a parallelism, and a precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from titan_testing.jobs import make_job
from titan_testing.meshes import Case
from titan_testing.pytest_plugin import RunJob
from titan_testing.settings import SMALL, inline
from titan_testing.suites.base import MESHES, Suite, require, saving_in

_ARGS: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64}
MODELS: Mapping[str, Mapping[str, object]] = {
    "dense": {"model.args": inline(_ARGS)},
    "tied": {"model.args": inline({**_ARGS, "tie_embeddings": True})},
    "windows": {"model.args": inline({**_ARGS, "window": 12, "sinks": True, "softcap": 20.0})},
    "experts": {"model.args": inline({**_ARGS, "experts": 2})},
    "a mixer of its own": {"model.args": inline({**_ARGS, "recurrent": True})},
}
"""Kinds of models, by overrides of the recipe ``tiny``."""
TECHNIQUES: Mapping[str, Mapping[str, object]] = {
    "masked documents": {"data.document_mask": "true"},
    "full recomputation": {"activation_checkpoint.mode": "full"},
    "chunks of the loss": {"objective.chunk_tokens": 20},
    "validation": {"validation.enable": "true", "validation.dataset": "stdlib", "validation.steps": 1, "validation.freq": 2},
}


class TransformSuite(Suite):
    """Tests of a parallelism, given the overrides that switch it on and the number of its ranks."""

    switched_on: ClassVar[Mapping[str, object]]
    """Overrides, such as ``{"racks.count": 2}``."""
    ranks: ClassVar[int] = 2
    """Number of ranks that it has with :attr:`switched_on`, without other parallelisms."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Distributions that its jobs need."""
    meshes = ("FSDP 2", "TP 2", "PP 2, 1F1B", "CP 2")
    """Meshes that it is composed with. Its ranks multiply theirs."""

    def rows(self, test: str) -> Mapping[str, Any]:
        """See :class:`Suite`."""
        tables: dict[str, Mapping[str, Mapping[str, object]]] = {"test_model": MODELS, "test_technique": TECHNIQUES}
        if test in tables:
            return {name: self._case(name, overrides) for name, overrides in tables[test].items()}
        if test == "test_composed":
            return {name: self._case(name, MESHES[name].overrides, MESHES[name]) for name in self.meshes}
        return {"": self._case("", {})}

    def _case(self, name: str, overrides: Mapping[str, object], mesh: Case | None = None) -> Case:
        ranks = self.ranks if mesh is None else self.ranks * mesh.ranks
        needs = self.needs if mesh is None else (*self.needs, *mesh.needs)
        return Case(name, ranks, {**overrides, **self.switched_on}, needs=needs)

    def reference(self, row: Case) -> dict[str, object]:
        """Return the overrides of the job on one device that ``row`` is compared with."""
        models = {key: value for key, value in row.overrides.items() if key.startswith("model.")}
        return {**SMALL, **self.settings, **models, **TECHNIQUES.get(row.name, {})}

    def elsewhere(self) -> Mapping[str, object]:
        """Return the overrides of the job on one device that continues a run with the transform."""
        return {}

    def _compare(self, row: Case, run_job: RunJob) -> None:
        require(row.needs)
        on_mesh = {**SMALL, **self.settings, **row.overrides}
        if row.name in self.unsupported:
            self.require_refused(row.name, run_job, on_mesh, row.ranks)
            return
        one = run_job(self.recipe, self.reference(row))
        self.require_equal_records(run_job(self.recipe, on_mesh, world_size=row.ranks), one)

    def test_model(self, row: Case, run_job: RunJob) -> None:
        """Every kind of model trains as on one device, or is refused."""
        self._compare(row, run_job)

    def test_composed(self, row: Case, run_job: RunJob) -> None:
        """Beside each other dimension of the mesh, a model trains as on one device."""
        self._compare(row, run_job)

    def test_technique(self, row: Case, run_job: RunJob) -> None:
        """With each technique, a model trains as on one device."""
        self._compare(row, run_job)

    def test_resumed_elsewhere(self, run_job: RunJob, tmp_path: Path) -> None:
        """A run that is saved under the transform continues on one device, and the other way round."""
        require([*self.needs, "titan-ckpt"])
        base = {**SMALL, **self.settings}
        whole = run_job(self.recipe, {**base, **self.elsewhere()})
        on: tuple[Mapping[str, object], int] = (self.switched_on, self.ranks)
        one = (self.elsewhere(), 1)
        for name, (before, ranks), (after, ranks_after) in (("on", on, one), ("one", one, on)):
            saved = {**base, **saving_in(tmp_path / name)}
            run_job(self.recipe, {**saved, **before, "training.stop_at_step": 2}, world_size=ranks)
            resumed = run_job(self.recipe, {**saved, **after}, world_size=ranks_after)
            assert resumed.losses == pytest.approx(whole.losses[2:], rel=self.loss)

    def test_it_takes_part(self) -> None:
        """The overrides switch the transform on: without this, the other tests would compare one device with itself."""
        job = make_job(self.recipe, {**SMALL, **self.settings, **self.switched_on}, world_size=self.ranks)
        off = make_job(self.recipe, {**SMALL, **self.settings}, world_size=1)
        assert {one.name for one in job.transforms} - {one.name for one in off.transforms}, "no transform became active"


class PrecisionSuite(TransformSuite):
    """Tests of a precision: it changes results, and on every mesh by the same."""

    ranks = 1
    loss = 1e-4
    gradient = 1e-2

    def reference(self, row: Case) -> dict[str, object]:
        """See :class:`TransformSuite`: one device computes in the precision too."""
        return {**super().reference(row), **self.switched_on}

    def elsewhere(self) -> Mapping[str, object]:
        """See :class:`TransformSuite`: a resumed run keeps its precision."""
        return self.switched_on

    def test_it_changes_results(self, run_job: RunJob) -> None:
        """The precision computes something: losses differ from those without it, and by little."""
        plain = run_job(self.recipe, {**SMALL, **self.settings})
        changed = run_job(self.recipe, {**SMALL, **self.settings, **self.switched_on})
        assert changed.losses != plain.losses
        assert changed.losses == pytest.approx(plain.losses, rel=0.05)
