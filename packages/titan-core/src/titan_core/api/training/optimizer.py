"""Contexts of optimizers and learning-rate schedules, and the parameters to train, with names, roles and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_core.api.config.sections import OptimizerSection
from titan_core.api.model.layout import ModelLayout, matches
from titan_core.api.parallel.model_part import ModelPart
from titan_core.api.plugins.job import JobContext, S, TrainingContext


class ParameterRole(StrEnum):
    """Kind of a parameter, by its place in the :class:`~titan_core.api.ModelLayout` and its shape."""

    EMBEDDING = "embedding"
    """A matrix of the modules before the blocks: a token or position embedding."""
    HIDDEN_MATRIX = "hidden matrix"
    """A 2-D weight of a layer in a block."""
    HIDDEN_STACK = "hidden stack"
    """A weight of a block with more than two dimensions: stacked expert matrices, or a convolution kernel."""
    HEAD = "head"
    """A matrix of the modules after the blocks: the output projection."""
    VECTOR = "vector"
    """A gain, bias or scalar in any module, including the biases of stacked experts."""


def is_vector(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter scales or shifts features rather than mixing them: it has fewer than two dimensions or is a bias.
    Biases are also recognised by name, because the biases of stacked experts form a matrix.

    Dimensions are those of the full parameter: a ``DTensor`` has its global shape.
    """
    return parameter.dim() < 2 or name.endswith("bias")


def role_of(name: str, parameter: nn.Parameter, layout: ModelLayout) -> ParameterRole:
    """Return the role of the parameter with the fully qualified name ``name``."""
    if is_vector(name, parameter):
        return ParameterRole.VECTOR
    if name.startswith(f"{layout.blocks}."):
        return ParameterRole.HIDDEN_MATRIX if parameter.dim() == 2 else ParameterRole.HIDDEN_STACK
    in_head = any(name.startswith(f"{module}.") for module in layout.head)
    return ParameterRole.HEAD if in_head else ParameterRole.EMBEDDING


@dataclass(frozen=True, eq=False)
class TrainedParameter:
    """A parameter to train, as this rank holds it."""

    name: str
    """Fully qualified name, the same on every mesh."""
    tensor: nn.Parameter
    """A ``DTensor`` if it is sharded over ranks."""
    role: ParameterRole
    """What the parameter is for: an optimizer may treat matrices of blocks in a way of their own."""

    @property
    def shape(self) -> torch.Size:
        """The global shape, regardless of sharding."""
        return self.tensor.shape


def trained_parameters(parts: Iterable[ModelPart]) -> Iterator[TrainedParameter]:
    """Yield each parameter of this rank's ``parts`` that requires gradients once, in model order."""
    for part in parts:
        for name, tensor in part.named_parameters():
            if tensor.requires_grad:
                yield TrainedParameter(name, tensor, role_of(name, tensor, part.layout))


@dataclass
class ParamGroup:
    """Parameters with the same settings."""

    lr_scale: float
    """Factor on the optimizer's learning rate."""
    weight_decay: float
    """The weight decay, not a factor."""
    parameters: list[TrainedParameter] = field(default_factory=list)
    """Those of this rank."""

    def as_dict(self, lr: float, *roles: ParameterRole) -> dict[str, Any]:
        """Return a parameter group for torch's optimizers.

        Args:
            lr: the optimizer's learning rate, without ``lr_scale``.
            roles: the roles of the parameters to include (default: all).
        """
        params = [parameter.tensor for parameter in self.parameters if not roles or parameter.role in roles]
        return {"params": params, "lr": lr * self.lr_scale, "weight_decay": self.weight_decay}


def param_groups(parameters: Iterable[TrainedParameter], section: OptimizerSection) -> list[ParamGroup]:
    """Sort parameters into groups. The first pattern that matches a name applies; other parameters use the section's
    settings. Without ``section.param_groups``, vectors form a group without weight decay: pulling towards zero is not
    neutral for a gain and does not regularise a bias.

    Groups without parameters are omitted (on a pipeline stage, some may be empty). A rank whose stages are frozen has one
    group, without parameters.
    """
    specs = section.param_groups or []
    rest = ParamGroup(1.0, section.weight_decay)
    undecayed = ParamGroup(1.0, 0.0)
    groups = [
        ParamGroup(spec.lr_scale, section.weight_decay if spec.weight_decay is None else spec.weight_decay) for spec in specs
    ]
    for parameter in parameters:
        chosen = (group for spec, group in zip(specs, groups, strict=True) if matches(parameter.name, [spec.pattern]))
        is_undecayed = section.param_groups is None and parameter.role is ParameterRole.VECTOR
        next(chosen, undecayed if is_undecayed else rest).parameters.append(parameter)
    # The group without a pattern comes first: the first group's learning rate is the one reported.
    return [group for group in (rest, *groups, undecayed) if group.parameters] or [rest]


@runtime_checkable
class SkipsOnDevice(Protocol):
    """An optimizer that can skip a step on the device. With any other optimizer, the host waits before each update if an
    observer may skip it (``training.on_nan`` = "stop" or "skip")."""

    def step_unless(self, skip: Tensor) -> None:
        """Take a step, but change neither parameters nor state if ``skip`` is true: a 0-d bool tensor on the device of the
        parameters, which may still be in flight."""


@dataclass(frozen=True, kw_only=True)
class OptimizerContext(TrainingContext[S]):
    """The context with which an optimizer is built.

    An optimizer with its own section finds the settings that all optimizers share (``beta1``, ``eps``, ...) in
    ``context.job.section(OptimizerSection)``.
    """

    groups: Sequence[ParamGroup]
    """The parameters to train, grouped by learning rate and weight decay according to ``[optimizer]``. An optimizer may
    split the groups further by role, with :meth:`ParamGroup.as_dict`. One group has no parameters on a rank that has none to
    train, and torch's optimizers need at least one group."""


@dataclass(frozen=True, kw_only=True)
class LRScheduleContext(JobContext[S]):
    """The context with which a learning-rate schedule is built."""

    optimizer: Optimizer
    """The optimizer whose parameter groups' ``lr`` the schedule sets."""
    steps: int
    """Total number of optimizer steps."""
