"""muP: initial values and learning rates that transfer from a narrow base model to a wide one (:mod:`.mup_rules`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import (
    JobContext,
    ModelPart,
    OptimizerContext,
    OptimizerSection,
    ParamGroup,
    Problem,
    TrainingContext,
    UserError,
)
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.optimizers import OnLocalShards, step_unless
from titan_optim.config import MuPSection
from titan_optim.mup_rules import WidthRules


class MuAdamW(OnLocalShards, torch.optim.AdamW):
    """torch's AdamW. It can skip a step on the device (:class:`~titan_core.api.SkipsOnDevice`)."""

    def step_unless(self, skip: Tensor) -> None:
        """See :class:`~titan_core.api.SkipsOnDevice`."""
        step_unless(self, skip)


def build(context: OptimizerContext[MuPSection]) -> MuAdamW:
    """Build AdamW with the learning rate of each parameter's widths.

    Weight decay is decoupled: a step takes off the product of learning rate and decay. The decay is divided by the factor on
    the learning rate, so that this product does not depend on widths.

    Raises:
        UserError: there is no base model, or the rules do not know a parameter.
    """
    shared = context.job.section(OptimizerSection)
    if not context.section.base:
        why = "has no base model, so it would be AdamW"
        raise UserError(context.config.problem("optimizer.name", why, "set mup.base"))
    rules = WidthRules.of(_job(context), context.section.base)
    groups = sorted((pair for group in context.groups for pair in _split(group, rules)), key=lambda pair: pair[0] != 1.0)
    # The rates of parameters without widths come first: the first group's is the one reported.
    params = [group.as_dict(shared.lr) for _, group in groups]
    return MuAdamW(params, betas=(shared.beta1, shared.beta2), eps=shared.eps, fused=True)


def _split(group: ParamGroup, rules: WidthRules) -> Iterator[tuple[float, ParamGroup]]:
    """Yield the parameters of ``group`` by the factor on their learning rate, and that factor."""
    found: dict[float, list[Any]] = defaultdict(list)
    for parameter in group.parameters:
        found[rules.rule(parameter.name, parameter.shape).lr].append(parameter)
    for factor, parameters in found.items() or [(1.0, group.parameters)]:  # a rank may have nothing to train
        yield factor, ParamGroup(group.lr_scale * factor, group.weight_decay / factor, parameters)


def apply(part: ModelPart, context: TrainingContext[MuPSection]) -> ModelPart:
    """Replace the initial values in the layout of ``part``, the whole model."""
    rules = WidthRules.of(_job(context), context.section.base)
    values = {name: rules.initial_value(name, one.shape) for name, one in part.module.named_parameters()}
    others = {pattern: value for pattern, value in part.layout.parameters.items() if pattern not in values}
    return replace(part, layout=replace(part.layout, parameters={**values, **others}))


def check_model(model: nn.Module, trial: object, context: TrainingContext[MuPSection]) -> Iterator[Problem]:
    """Check that the base model differs from the job's in widths only, before anything is built."""
    try:
        rules = WidthRules.of(_job(context), context.section.base)
        for name, parameter in model.named_parameters():
            rules.initial_value(name, parameter.shape)
    except UserError as error:
        yield from error.problems


def _job(context: JobContext[Any]) -> AssembledJob:
    assert isinstance(context.job, AssembledJob)  # of every context once training starts
    return context.job
