"""Checking before the first step that the state of an optimizer can be saved."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents.optimizer_state import group_values, state_of
from titan_core.api import CheckpointContext, OptimizerSection, ParameterRole, ParamGroup, TrainedParameter
from titan_core.toolkit.models import param_groups, trained_parameters


def try_optimizer(context: CheckpointContext[CheckpointSection]) -> None:
    """Take one step with a second optimizer of the same kind, on copies of a few small parameters. The run's own optimizer
    is not used, because a step may have effects that cannot be undone.

    Raises:
        Unsaveable: the optimizer's state cannot be saved.
    """
    job, world = context.job, context.world
    section = job.config.section(OptimizerSection)
    groups: list[ParamGroup] = []
    copies: dict[nn.Parameter, str] = {}
    for group in param_groups(trained_parameters(context.state.parts), section):
        # The optimizer may keep different state for each role and number of dimensions.
        smallest: dict[tuple[ParameterRole, int], TrainedParameter] = {}
        for parameter in group.parameters:
            kind = parameter.role, parameter.tensor.dim()
            known = smallest.get(kind)
            if known is None or parameter.tensor.numel() < known.tensor.numel():
                smallest[kind] = parameter
        trial = [
            replace(parameter, tensor=nn.Parameter(parameter.tensor.detach().clone())) for parameter in smallest.values()
        ]
        copies |= {parameter.tensor: parameter.name for parameter in trial}
        groups.append(replace(group, parameters=trial))
    optimizer = job.optimizer.build.load()(job.optimizer.optimizer_context(job, world.mesh, world.device, groups))
    built = group_values(optimizer)
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    optimizer.step()
    state_of(copies, optimizer, built)
