"""torch's Adam and AdamW, computed on this rank's shards."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_core.api import OptimizerContext, OptimizerSection
from titan_core.torch_private import OnLocalShards, step_unless


class Adam(OnLocalShards, torch.optim.Adam):
    """torch's Adam."""


class AdamW(OnLocalShards, torch.optim.AdamW):
    """torch's AdamW."""


class FusedAdam(Adam):
    """Adam that can skip a step on the device."""

    def step_unless(self, skip: Tensor) -> None:
        """See :class:`~titan_core.api.SkipsOnDevice`."""
        step_unless(self, skip)


class FusedAdamW(AdamW):
    """AdamW that can skip a step on the device."""

    def step_unless(self, skip: Tensor) -> None:
        """See :class:`~titan_core.api.SkipsOnDevice`."""
        step_unless(self, skip)


def build_adamw(context: OptimizerContext[OptimizerSection]) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov and Hutter, 2019)."""
    return _build(AdamW, FusedAdamW, context)


def build_adam(context: OptimizerContext[OptimizerSection]) -> torch.optim.Optimizer:
    """Build Adam (Kingma and Ba, 2015)."""
    return _build(Adam, FusedAdam, context)


def _build(
    plain: type[Adam] | type[AdamW], fused: type[Adam] | type[AdamW], context: OptimizerContext[OptimizerSection]
) -> torch.optim.Optimizer:
    section = context.section
    is_fused = section.implementation in ("auto", "fused")
    return (fused if is_fused else plain)(
        [group.as_dict(section.lr) for group in context.groups],
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=is_fused,
        foreach=section.implementation == "foreach",
    )
