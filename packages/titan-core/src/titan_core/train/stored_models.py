"""Computing with a stored model, without training it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_core.api.errors import UserError
from titan_core.api.events import ValidationReport
from titan_core.api.job import Job
from titan_core.api.sections import TrainingSection
from titan_core.api.shared_request import SharedRequest
from titan_core.api.step import GradientAccumulation
from titan_core.api.stored_model import LoadedModel, StoredModel, WeightsContext
from titan_core.data.streams import open_sources
from titan_core.model.build import build_parts
from titan_core.train.outcome import OutcomeRecorder
from titan_core.train.seeds import prepare_numerics
from titan_core.train.validation import Validation
from titan_core.train.world import join_world


@contextmanager
def open_model(job: Job, stored: StoredModel) -> Iterator[LoadedModel]:
    """See :meth:`titan_core.api.stored_model.StoredModels.open`. Records an error within the context for the launcher."""
    _require_whole_layers(job)
    job.require_hardware()
    with join_world(job) as world:
        try:
            prepare_numerics(job.config.section(TrainingSection), world)
            (part,) = build_parts(job, world.mesh, world.device)
            stored.load.load()(WeightsContext(job, world, [part], stored))
            part.module.eval()
            with torch.no_grad():
                yield LoadedModel(job, world, part)
            world.sum(torch.zeros(()))  # a rank that leaves early would abort those that still compute
        except BaseException as error:
            # Before this rank closes its connections, on which the others fail.
            OutcomeRecorder(world.rank, job.dump_folder, keeps_log=False).failed(error)
            raise


def validate(loaded: LoadedModel) -> ValidationReport:
    """See :meth:`titan_core.api.stored_model.StoredModels.validate`."""
    job = loaded.job
    assert job.validation is not None, "the job has no validation data"
    sources = open_sources(job.validation)
    run, stop = GradientAccumulation(loaded.part), SharedRequest()
    report = Validation(job, job.validation, sources, loaded.world, [loaded.part], run, stop).measure(0)
    assert report is not None  # nothing requests a stop
    return report


def _require_whole_layers(job: Job) -> None:
    """
    Raises:
        UserError: the mesh divides layers, or positions, of which generation computes one at a time.
    """
    for dim in job.facts.mesh.dims:
        degree = job.facts.mesh.degrees[dim.name]
        if degree > 1 and dim.divides in ("layers", "sequence"):
            why = "a stored model cannot be divided over layers or positions"
            raise UserError.one(job.config.where(dim.degree_key, degree), why, f"set {dim.degree_key} = 1")
