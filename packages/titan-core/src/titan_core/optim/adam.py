"""torch's Adam and AdamW."""

from __future__ import annotations

import torch

from titan_core.api.optimizer import OptimizerContext
from titan_core.api.sections import OptimizerSection


def build_adamw(context: OptimizerContext[OptimizerSection]) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov and Hutter, 2019)."""
    return _build(torch.optim.AdamW, context)


def build_adam(context: OptimizerContext[OptimizerSection]) -> torch.optim.Optimizer:
    """Build Adam (Kingma and Ba, 2015)."""
    return _build(torch.optim.Adam, context)


def _build(
    cls: type[torch.optim.AdamW] | type[torch.optim.Adam], context: OptimizerContext[OptimizerSection]
) -> torch.optim.Optimizer:
    section = context.section
    return cls(
        [group.as_dict() for group in context.groups],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=section.implementation in ("auto", "fused"),
        foreach=section.implementation == "foreach",
    )
