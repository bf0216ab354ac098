"""The parameters of a job that ``training.freeze`` keeps from being trained."""

from __future__ import annotations

import math

from titan_core.api import matches
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob


def frozen_parameters(job: AssembledJob) -> dict[str, int]:
    """Return name -> number of elements of each frozen parameter, a shared one once. Imports torch if there may be some."""
    patterns = job.section(TrainingSection).freeze
    if not patterns:
        return {}
    from titan_simulate.plan.shapes import shapes_of

    tied = {source for name, source in job.model.layout.tied.items() if matches(name, patterns)}
    shapes = shapes_of(job.family.define, job.model_args).parameters
    return {name: math.prod(shape) for name, shape in shapes.items() if name in tied or matches(name, patterns)}
