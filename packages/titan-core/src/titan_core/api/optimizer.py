"""What an optimizer and a learning rate schedule are built with: parameters with their names, roles and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from titan_core.api.build_context import JobContext, S, TrainingContext
from titan_core.api.errors import UserError
from titan_core.api.layout import ModelLayout
from titan_core.api.model_part import ModelPart
from titan_core.api.sections import OptimizerSection
from titan_core.api.tools.patterns import matches


class ParameterRole(StrEnum):
    """What a parameter is, by its place in the :class:`~titan_core.api.layout.ModelLayout` and its shape."""

    EMBEDDING = "embedding"
    """A matrix of the modules before the blocks: token or position embeddings."""
    HIDDEN_MATRIX = "hidden matrix"
    """The 2-D weight of a layer in a block."""
    HIDDEN_STACK = "hidden stack"
    """A weight of a block with more dimensions: the stacked matrices of experts, or the kernel of a convolution."""
    HEAD = "head"
    """A matrix of the modules after the blocks: the output projection."""
    VECTOR = "vector"
    """A gain, a bias or a scalar, wherever it is. The biases of stacked experts are vectors too."""


def is_vector(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter scales or shifts features instead of mixing them: it has fewer than two dimensions, or it is a
    bias. A bias is recognised by name too, since the biases of stacked experts are a matrix.

    The dimensions are those of the whole parameter: a ``DTensor`` has its global shape.
    """
    return parameter.dim() < 2 or name.endswith("bias")


def role_of(name: str, parameter: nn.Parameter, layout: ModelLayout) -> ParameterRole:
    """The role of the parameter with the fully qualified name ``name``."""
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
    """Fully qualified, the same on every mesh."""
    tensor: nn.Parameter
    """A ``DTensor`` where it is divided among ranks."""
    role: ParameterRole

    @property
    def shape(self) -> torch.Size:
        """The global shape, however ranks divide the parameter."""
        return self.tensor.shape


def trained_parameters(parts: Iterable[ModelPart]) -> Iterator[TrainedParameter]:
    """The parameters of this rank's ``parts`` that require gradients, each once, in the order of the model."""
    for part in parts:
        for name, tensor in part.module.named_parameters():
            if tensor.requires_grad:
                yield TrainedParameter(name, tensor, role_of(name, tensor, part.layout))


@dataclass
class ParamGroup:
    """Parameters that share their settings."""

    lr: float
    weight_decay: float
    parameters: list[TrainedParameter] = field(default_factory=list)

    def as_dict(self, *roles: ParameterRole) -> dict[str, Any]:
        """A parameter group as torch's optimizers take it, of the parameters with one of ``roles`` (default: all)."""
        params = [one.tensor for one in self.parameters if not roles or one.role in roles]
        return {"params": params, "lr": self.lr, "weight_decay": self.weight_decay}


def param_groups(parameters: Iterable[TrainedParameter], section: OptimizerSection) -> list[ParamGroup]:
    """Sort parameters into groups: the first pattern that matches a name decides, the rest have the section's settings.
    Without ``section.param_groups`` there are two groups, and vectors have no weight decay: it pulls towards zero, which is
    no neutral value for a gain and regularises nothing in a bias.

    Groups without a parameter are left out (a pipeline stage may have none of some).

    Raises:
        UserError: there is no parameter to train.
    """
    specs = section.param_groups or []
    rest = ParamGroup(section.lr, section.weight_decay)
    undecayed = ParamGroup(section.lr, 0.0)
    groups = [
        ParamGroup(section.lr * spec.lr_scale, section.weight_decay if spec.weight_decay is None else spec.weight_decay)
        for spec in specs
    ]
    for parameter in parameters:
        chosen = (group for spec, group in zip(specs, groups, strict=True) if matches(parameter.name, [spec.pattern]))
        is_undecayed = section.param_groups is None and parameter.role is ParameterRole.VECTOR
        next(chosen, undecayed if is_undecayed else rest).parameters.append(parameter)
    # The unnamed rest first: its learning rate is the one that is reported.
    filled = [group for group in (rest, *groups, undecayed) if group.parameters]
    if not filled:
        raise UserError.one("model", "it has no parameter to train", "fix the model plugin")
    return filled


@dataclass(frozen=True, kw_only=True)
class OptimizerContext(TrainingContext[S]):
    """What an optimizer is built with.

    An optimizer with a section of its own finds the settings that all optimizers share (``beta1``, ``eps``, ...) in
    ``context.facts.section(OptimizerSection)``.
    """

    groups: Sequence[ParamGroup]
    """The parameters to train, by learning rate and weight decay, as ``[optimizer]`` decides. An optimizer may
    divide them further; :meth:`ParamGroup.as_dict` takes roles."""


@dataclass(frozen=True, kw_only=True)
class LRScheduleContext(JobContext[S]):
    """What a learning rate schedule is built with."""

    optimizer: Optimizer
    steps: int
    """Total optimizer steps."""
