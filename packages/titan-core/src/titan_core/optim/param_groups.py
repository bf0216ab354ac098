"""Optimizer settings by parameter name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from titan_core.config.sections import OptimizerSection, ParamGroupSpec
from titan_core.errors import UserError
from titan_core.patterns import matches

DEFAULT_GROUPS = [
    ParamGroupSpec(pattern="*norm*", weight_decay=0.0),
    ParamGroupSpec(pattern="*bias", weight_decay=0.0),
]
"""Weight decay pulls towards zero, which is no neutral value for a norm's gain and does nothing good for a bias."""


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


def param_groups(named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> list[ParamGroup]:
    """Sort parameters into groups: the first pattern that matches a name decides, the rest have the section's settings.

    Groups without a parameter are left out (a pipeline stage may have none of some).

    Raises:
        UserError: no parameter is to be trained.
    """
    specs = DEFAULT_GROUPS if section.param_groups is None else section.param_groups
    rest = ParamGroup(section.lr, section.weight_decay)
    groups = [
        ParamGroup(section.lr * spec.lr_scale, section.weight_decay if spec.weight_decay is None else spec.weight_decay)
        for spec in specs
    ]
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        chosen = (group for spec, group in zip(specs, groups, strict=True) if matches(name, [spec.pattern]))
        group = next(chosen, rest)
        group.params.append(parameter)
        group.names.append(name)
    # The unnamed rest first: its learning rate is the one that is reported.
    filled = [group for group in (rest, *groups) if group.params]
    if not filled:
        raise UserError.one("model", "it has no parameter to train", "mend the model plugin")
    return filled
