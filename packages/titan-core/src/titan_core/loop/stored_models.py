"""Computing with a stored model without training it, and starting a run from one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from titan_core.api import ModelPart, SharedRequest, StoredModel, UserError, ValidationReport, WeightsContext, World
from titan_core.api.checkpoint.stored_model import LoadedModel
from titan_core.api.config.sections import ModelSection, TrainingSection
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.pretrained import find_model
from titan_core.data.streams import open_sources
from titan_core.loop.outcome import OutcomeRecorder
from titan_core.loop.process_settings import prepare_numerics
from titan_core.loop.validation import Validation
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts

log = logging.getLogger(__name__)


@contextmanager
def open_model(job: AssembledJob, stored: StoredModel) -> Iterator[LoadedModel]:
    """See :meth:`.StoredModels.open`. Records an error within the context for the launcher."""
    job.require_hardware()
    with join_world(job) as world:
        try:
            prepare_numerics(job.config.section(TrainingSection), world)
            (part,) = build_parts(job, world.mesh, world.device, world=world)
            stored.load.load()(WeightsContext(job, world, [part], stored))
            part.module.eval()
            with torch.no_grad():
                yield LoadedModel(job, world, part)
            world.sum(torch.zeros(()))  # a rank that leaves early would abort those that still compute
        except BaseException as error:
            # Before this rank closes its connections, on which the others fail.
            OutcomeRecorder(world.rank, job.dump_folder, keeps_log=False).failed(error)
            raise


def load_pretrained(job: AssembledJob, world: World, parts: list[ModelPart]) -> Mapping[str, Any]:
    """Load the weights of ``model.from_pretrained`` into ``parts``, if set; return
    :attr:`~titan_core.api.StoredModel.origin`.

    Raises:
        UserError: there are no such weights, or they are not those of the job's model; on every rank.
    """
    path = job.config.section(ModelSection).from_pretrained
    if path is None:
        return {}
    found, mistake = None, None
    try:
        found = job.config.pretrained or find_model(path, job.registry)  # which says why there is none
    except UserError as error:
        mistake = error
    world.raise_together(mistake)
    assert found is not None
    found.load.load()(WeightsContext(job, world, parts, found))
    log.info("starting from the weights in %s", found.path)
    return found.origin


def validate(loaded: LoadedModel) -> ValidationReport:
    """See :meth:`titan_core.api.checkpoint.stored_model.StoredModels.validate`."""
    job = loaded.job
    assert job.validation is not None, "the job has no validation data"
    if job.objective.reference is not None:
        why = "compares with a reference model, which only training builds"
        raise UserError(job.config.problem("objective.name", why, 'set objective.name = "next_token"'))
    sources = open_sources(job.validation)
    run, stop = GradientAccumulation(loaded.part), SharedRequest()
    return Validation(job, job.validation, sources, loaded.world, [loaded.part], run, stop).measure(0)[0]
