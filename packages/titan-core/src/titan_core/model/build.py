"""Building this rank's parts of the model: on the meta device, transformed, then materialised."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_core.api import (
    JobMesh,
    ModelPart,
    OptimizerSection,
    TrainingContext,
    Transform,
    UserError,
    World,
    matches,
)
from titan_core.api.config.sections import DataSection, ObjectiveSection, TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.errors import shown
from titan_core.model.freeze import freeze, let_gradients_begin
from titan_core.model.layout_check import check_layout
from titan_core.model.layout_trial import try_model
from titan_core.model.loss_head import attach, build_objective
from titan_core.model.materialise import materialise
from titan_core.model.mesh_trial import try_division
from titan_core.model.part_guard import PartGuard
from titan_core.model.streams import begin_streams
from titan_core.plugins.guard import Origin
from titan_core.torch_private import variable_length_attention

log = logging.getLogger(__name__)


def build_whole(job: AssembledJob) -> nn.Module:
    """Return the whole model of ``job`` on the meta device, without weights. Its frozen parameters require no gradient.

    Raises:
        UserError: the model contradicts its layout, or ``training.freeze`` does not fit it.
    """
    definition = job.model
    with torch.device("meta"):
        model = definition.build()
    if not isinstance(model, nn.Module):
        why = f"its definition's build returned {shown(model)}; it must return an nn.Module"
        raise UserError.one(f"model {job.model_name!r}", why, "fix the model plugin")
    with _naming_the_plugin(job):
        check_layout(model, definition.layout, job.model_name)
    freeze(model, job)
    return model


def build_parts(
    job: AssembledJob, mesh: JobMesh, device: torch.device, whole: nn.Module | None = None, world: World | None = None
) -> list[ModelPart]:
    """Return this rank's parts of the job's model, with weights. Without a pipeline there is one part.

    Args:
        whole: result of :func:`build_whole`, which is consumed (default: build it).
        world: the job's ranks, on which to check the sharding first, on a small copy; ``None``: do not check it.

    Raises:
        UserError: the model contradicts its layout, or a transform cannot divide the model.
    """
    definition = job.model
    model = build_whole(job) if whole is None else whole
    _check_param_groups(model, job)
    with _naming_the_plugin(job):
        loss_in_head = try_model(model, job, mesh, device)
        if world is not None:
            try_division(model, job, world, loss_in_head)
    objective = build_objective(job.objective, job.objective.training_context(job, mesh, device))
    part = ModelPart(model, definition.layout, objective, statistics=dict(definition.layout.statistics))
    if job.config.section(DataSection).document_attention == "varlen":
        part.saved_operators += (variable_length_attention(),)
        _log_other_attention(part, device)
    parts = [part]
    guard = PartGuard(job.registry)
    for transform in job.transforms:
        apply = partial(_apply, transform, transform.training_context(job, mesh, device))
        parts = [result for part in parts for result in guard.apply(transform.name, apply, part)]
    for part in parts:
        if loss_in_head:
            attach(part, job.config.section(ObjectiveSection).chunk_tokens)
        let_gradients_begin(part)
        materialise(part, device, job.config.section(TrainingSection).seed)
        begin_streams(part.module, device)
        part.module.train()
    return parts


def _log_other_attention(part: ModelPart, device: torch.device) -> None:
    """Log what variable-length attention does not compute, although the config requests it."""
    options = {"softcap": "capped scores", "sinks": "attention sinks"}
    mixers = part.layout.mixers.values()
    others = [what for name, what in options.items() if any(mixer.options[name] for mixer in mixers)]
    if device.type == "cpu":
        log.warning("data.document_attention has no effect on a CPU, which has no such kernel: attention has a mask")
    elif others:
        log.warning("data.document_attention: FlexAttention computes layers with %s", " or ".join(others))


@contextmanager
def _naming_the_plugin(job: AssembledJob) -> Iterator[None]:
    """Add the model's plugin to problems of its layout and its code."""
    try:
        yield
    except UserError as error:
        origin = job.family.define.origin
        if not isinstance(origin, Origin):
            raise
        owner = replace(origin, component="")
        of_model = (f"layout of model {job.model_name!r}", f"model {job.model_name!r}")
        problems = [
            replace(problem, where=f"{owner}: {problem.where}") if problem.where.startswith(of_model) else problem
            for problem in error.problems
        ]
        raise type(error)(*problems) from error.__cause__


def _apply(transform: Transform, context: TrainingContext[Any], part: ModelPart) -> ModelPart | Sequence[ModelPart]:
    return part if transform.apply is None else transform.apply.load()(part, context)


def _check_param_groups(model: nn.Module, job: AssembledJob) -> None:
    """Check that each pattern of ``optimizer.param_groups`` matches a parameter of the whole ``model``, or one that a
    transform adds.

    Raises:
        UserError: a pattern matches nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    for group in job.config.section(OptimizerSection).param_groups or []:
        if not any(matches(name, [group.pattern]) for name in (*names, *job.added)):
            where = job.config.where("optimizer.param_groups", group.pattern)
            raise UserError.one(
                where, "the pattern matches no parameter", f"match parameters such as {names[0]} or {names[-1]}"
            )
