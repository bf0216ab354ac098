"""Finding out before the first step whether what an optimizer and a schedule keep can be saved."""

from __future__ import annotations

import torch
from torch import nn

from titan_ckpt.optimizer_state import group_values, parameter_names, state_of
from titan_core.api.checkpoint import CheckpointRequest
from titan_core.api.param_groups import ParamGroup
from titan_core.api.sections import OptimizerSection


def try_optimizer(request: CheckpointRequest) -> None:
    """Take a step with another optimizer of the same kind, on copies of a few small parameters. The run keeps its own as is:
    a step may change more than can be taken back.

    Raises:
        Unsaveable: its state cannot be saved.
    """
    names = parameter_names(request.state.parts)
    section = request.job.config.section(OptimizerSection)
    groups: list[ParamGroup] = []
    copies: dict[nn.Parameter, str] = {}
    for group in request.state.optimizer.param_groups:
        smallest: dict[int, nn.Parameter] = {}  # vectors and matrices may be kept differently
        for parameter in group["params"]:
            known = smallest.get(parameter.dim())
            if known is None or parameter.numel() < known.numel():
                smallest[parameter.dim()] = parameter
        trial = {nn.Parameter(one.detach().clone()): names[one] for one in smallest.values() if one in names}
        copies |= trial
        decay = group.get("weight_decay", section.weight_decay)
        groups.append(ParamGroup(float(group.get("initial_lr", group["lr"])), decay, list(trial), list(trial.values())))
    optimizer = request.job.optimizer.build.load()(groups, section)
    built = group_values(optimizer)
    for parameter in copies:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    state_of(copies, optimizer, built)
