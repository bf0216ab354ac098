"""A run's tensors by name: ``model.<parameter>`` and ``optimizer.<parameter>.<state>``, on any mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_core.model.part import ModelPart

MODEL, OPTIMIZER = "model", "optimizer"


def model_tensors(parts: Sequence[ModelPart]) -> dict[str, Tensor]:
    """Parameters, and the buffers that are part of a model's state; a shared parameter once, under its first name."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        kept = part.module.state_dict().keys()
        for name, tensor in (*part.module.named_parameters(), *part.module.named_buffers()):
            if name in kept:
                tensors[f"{MODEL}.{name}"] = tensor.detach()
    return tensors


def buffer_names(parts: Sequence[ModelPart]) -> Iterator[str]:
    """What :func:`model_tensors` calls buffers."""
    return (f"{MODEL}.{name}" for part in parts for name, _ in part.module.named_buffers())


def optimizer_tensors(parts: Sequence[ModelPart], optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, which must be there (:func:`begin_optimizer`)."""
    names = {parameter: name for part in parts for name, parameter in part.module.named_parameters()}
    return {
        f"{OPTIMIZER}.{names[parameter]}.{key}": value.detach()
        for parameter in trained(optimizer)
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }


def begin_optimizer(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, as the first step would, without a change to any weight."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in trained(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def forget_state(parts: Sequence[ModelPart], optimizer: Optimizer, names: Collection[str]) -> None:
    """Forget what :func:`begin_optimizer` made for parameters that ``names`` has a tensor of: their first step makes it."""
    parameters = {
        name.removeprefix(f"{OPTIMIZER}.").rpartition(".")[0] for name in names if name.startswith(f"{OPTIMIZER}.")
    }
    for part in parts:
        for name, parameter in part.module.named_parameters():
            if name in parameters:
                optimizer.state.pop(parameter, None)


def trained(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Every parameter that the optimizer has."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return (parameter for group in groups for parameter in group["params"])
