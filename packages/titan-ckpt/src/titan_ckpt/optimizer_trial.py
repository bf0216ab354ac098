"""Finding out before the first step whether what an optimizer and a schedule keep can be saved."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from titan_ckpt.config import CheckpointSection
from titan_ckpt.optimizer_state import group_values, state_of
from titan_core.api.checkpoint import CheckpointContext
from titan_core.api.optimizer import (
    ParameterRole,
    ParamGroup,
    TrainedParameter,
    param_groups,
    trained_parameters,
)
from titan_core.api.sections import OptimizerSection


def try_optimizer(context: CheckpointContext[CheckpointSection]) -> None:
    """Take a step with another optimizer of the same kind, on copies of a few small parameters. The run keeps its own as is:
    a step may change more than can be taken back.

    Raises:
        Unsaveable: its state cannot be saved.
    """
    job, world = context.job, context.world
    section = job.config.section(OptimizerSection)
    groups: list[ParamGroup] = []
    copies: dict[nn.Parameter, str] = {}
    for group in param_groups(trained_parameters(context.state.parts), section):
        smallest: dict[tuple[ParameterRole, int], TrainedParameter] = {}  # each kind may be kept differently
        for parameter in group.parameters:
            kind = parameter.role, parameter.tensor.dim()
            known = smallest.get(kind)
            if known is None or parameter.tensor.numel() < known.tensor.numel():
                smallest[kind] = parameter
        trial = [replace(one, tensor=nn.Parameter(one.tensor.detach().clone())) for one in smallest.values()]
        copies |= {one.tensor: one.name for one in trial}
        groups.append(replace(group, parameters=trial))
    optimizer = job.optimizer.build.load()(job.optimizer.optimizer_context(job.facts, world.mesh, world.device, groups))
    built = group_values(optimizer)
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    optimizer.step()
    state_of(copies, optimizer, built)
