"""Stored models, as commands see them. Free of torch until one is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import Config, MeshPlan, Model, StoredModel, UserError
from titan_core.api.checkpoint.stored_model import LoadedModel
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import ModelSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import RawConfig, resolve
from titan_core.config.pretrained import describe_model, described_by, find_model
from titan_core.job.assemble import assemble, mesh_of
from titan_core.job.checks import check_pretrained
from titan_core.plugins.registry import Components
from titan_core.toolkit.errors import nearest
from titan_core.toolkit.status import StatusLine, phase

if TYPE_CHECKING:
    from titan_core.api import ValidationReport


@dataclass(frozen=True)
class InstalledModels:
    """See :class:`titan_core.api.checkpoint.stored_model.StoredModels`."""

    registry: Components
    overrides: Sequence[Override]

    def find(self, path: str) -> StoredModel:
        """See :meth:`titan_core.api.checkpoint.stored_model.StoredModels.find`."""
        return find_model(path, self.registry)

    def describe(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """See :meth:`titan_core.api.checkpoint.stored_model.StoredModels.describe`."""
        family, _, flavor = name.partition("/")
        if family not in self.registry.names(Model) or Path(name).is_dir():
            return described_by(describe_model(name, self.registry), self.registry)
        flavors = self.registry.get(Model, family).flavors
        if flavor not in flavors:
            raise UserError.one(name, f"model {family!r} has no such flavor", nearest(flavor, list(flavors)))
        return {ModelSection.section: {"name": family, "flavor": flavor}}

    def job(
        self,
        stored: StoredModel,
        world_size: int | None = None,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> AssembledJob:
        """See :meth:`titan_core.api.checkpoint.stored_model.StoredModels.job`."""
        given = {one.key: one.text for one in self.overrides}
        if "tokenizer" not in stored.sections["model"] and "model.tokenizer" not in given:
            why = "does not say which tokenizer the model was trained with"
            fix = (
                "add --model.tokenizer NAME and --model.tokenizer_path (`titan tokenizer download OWNER/NAME` downloads one)"
            )
            raise UserError.one(stored.path, why, fix)
        # A job needs a batch, although this one reads no data.
        tables: dict[str, dict[str, Any]] = {"training": {"seq_len": 1, "local_batch_size": 1}}
        described = described_by(stored.sections, self.registry)
        model, theirs = described["model"], stored.sections["model"]["args"]
        # What only training uses would take memory, and mixers that are not called have no state to decode with.
        unused = self.registry.get(Model, model["name"]).training_only
        model["args"].update((key, value) for key, value in unused.items() if theirs.get(key, value) != value)
        if given.get("model.tokenizer", model.get("tokenizer")) != model.get("tokenizer"):
            model.pop("tokenizer_path", None)  # it is that of the tokenizer beside the weights
        for layer in (described, sections or {}):
            for name, table in layer.items():
                tables[name] = {**tables.get(name, {}), **table}
        raw = RawConfig(stored.path, "stored_model", tables)
        config = resolve(raw, self.overrides, self.registry)
        _require_whole_layers(config, mesh_of(config, self.registry, world_size))
        job = assemble(config, self.registry, world_size, trains=False)
        # Before anything is allocated: a larger flavor may not fit into memory.
        if problems := list(check_pretrained(config, stored, job.model_args, job.family)):
            raise UserError(*problems)
        return job

    def validate(self, loaded: LoadedModel) -> ValidationReport:
        """See :meth:`titan_core.api.checkpoint.stored_model.StoredModels.validate`."""
        from titan_core.loop.stored_models import validate

        return validate(loaded)

    @contextmanager
    def open(self, job: AssembledJob, stored: StoredModel) -> Iterator[LoadedModel]:
        """See :meth:`titan_core.api.checkpoint.stored_model.StoredModels.open`."""
        with ExitStack() as stack:
            with (
                StatusLine() if os.environ.get("RANK", "0") == "0" else nullcontext(),
                phase("loading the model"),
            ):
                from titan_core.loop.stored_models import open_model  # imports torch

                loaded = stack.enter_context(open_model(job, stored))
            yield loaded


def _require_whole_layers(config: Config, mesh: MeshPlan) -> None:
    """
    Raises:
        UserError: the mesh divides layers, or positions, of which generation computes one at a time.
    """
    for dim in mesh.dims:
        degree = mesh.degrees[dim.name]
        if degree > 1 and dim.divides in ("layers", "sequence"):
            why = "a stored model cannot be divided over layers or positions"
            raise UserError.one(config.where(dim.degree_key, degree), why, f"set {dim.degree_key} = 1")
