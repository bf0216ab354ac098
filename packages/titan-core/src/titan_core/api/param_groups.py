"""Optimizer settings by parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from titan_core.api.errors import UserError
from titan_core.api.sections import OptimizerSection
from titan_core.api.tools.patterns import matches


@dataclass
class ParamGroup:
    """Parameters that share their settings."""

    lr: float
    weight_decay: float
    params: list[nn.Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """As torch's optimizers take it."""
        return {"params": self.params, "lr": self.lr, "weight_decay": self.weight_decay}


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter by default: to matrices (and stacks of them), not to the vectors and
    scalars that scale or shift features. Decay pulls towards zero, which is no neutral value for a gain and regularises
    nothing in a bias. A bias is recognised by name too, since the biases of stacked experts are a matrix.

    The dimensions are those of the whole parameter: a ``DTensor`` has its global shape.
    """
    return parameter.dim() >= 2 and not name.endswith("bias")


def param_groups(named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> list[ParamGroup]:
    """Sort parameters into groups: the first pattern that matches a name decides, the rest have the section's settings.
    Without ``section.param_groups`` there are two groups: what :func:`is_decayed`, and what is not.

    Groups without a parameter are left out (a pipeline stage may have none of some).

    Raises:
        UserError: no parameter is to be trained.
    """
    specs = section.param_groups or []
    rest = ParamGroup(section.lr, section.weight_decay)
    undecayed = ParamGroup(section.lr, 0.0)
    groups = [
        ParamGroup(section.lr * spec.lr_scale, section.weight_decay if spec.weight_decay is None else spec.weight_decay)
        for spec in specs
    ]
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        chosen = (group for spec, group in zip(specs, groups, strict=True) if matches(name, [spec.pattern]))
        otherwise = undecayed if section.param_groups is None and not is_decayed(name, parameter) else rest
        group = next(chosen, otherwise)
        group.params.append(parameter)
        group.names.append(name)
    # The unnamed rest first: its learning rate is the one that is reported.
    filled = [group for group in (rest, *groups, undecayed) if group.params]
    if not filled:
        raise UserError.one("model", "it has no parameter to train", "fix the model plugin")
    return filled
