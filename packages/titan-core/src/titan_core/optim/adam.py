"""Adam and AdamW, torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan_core.api.param_groups import ParamGroup
from titan_core.api.sections import OptimizerSection


def build_adamw(groups: Sequence[ParamGroup], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019)."""
    return _build(torch.optim.AdamW, groups, section)


def build_adam(groups: Sequence[ParamGroup], section: OptimizerSection) -> torch.optim.Optimizer:
    """Adam (Kingma and Ba, 2015)."""
    return _build(torch.optim.Adam, groups, section)


def _build(
    cls: type[torch.optim.AdamW] | type[torch.optim.Adam], groups: Sequence[ParamGroup], section: OptimizerSection
) -> torch.optim.Optimizer:
    return cls(
        [group.as_dict() for group in groups],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=section.implementation in ("auto", "fused"),
        foreach=section.implementation == "foreach",
    )
