"""The number of parameters of a model, counted in the built model."""

from __future__ import annotations

import logging

from torch import nn

from titan_core.api.observe.events import ModelSize
from titan_core.api.plugins.assembled_job import AssembledJob

log = logging.getLogger(__name__)


def size_of(model: nn.Module, job: AssembledJob) -> ModelSize:
    """Return the size of ``model``, the whole model of ``job``. Warn if its plugin declares another number of parameters,
    which commands that build no model show."""
    definition = job.model
    modules = (model.get_submodule(name) for name in definition.layout.embedding)
    embedding = {id(parameter) for module in modules for parameter in module.parameters()}
    counts = {id(parameter): parameter.numel() for parameter in model.parameters()}  # a tied parameter occurs once
    total = sum(counts.values())
    if total != definition.num_params:
        declared = definition.num_params
        log.warning("model %r has %d parameters, but its definition has num_params = %d", job.model_name, total, declared)
    return ModelSize(total, total - sum(counts[parameter] for parameter in embedding))
