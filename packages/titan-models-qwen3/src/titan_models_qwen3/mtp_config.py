"""The config key of multi-token prediction, and the tensors of a batch that it needs. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Final

from titan_core.api import PositiveFloat, Section

TOKENS: Final = "mtp_tokens"
"""Extra tensor of a batch: the tokens after each position, int64 ``[batch, seq, depths]``."""
TARGETS: Final = "mtp_targets"
"""Extra tensor: the tokens to predict from them, like :attr:`titan_core.api.Batch.targets`."""
WEIGHTS: Final = "mtp_weights"
"""Extra tensor: the weights of these targets, fp32; 0 where there is none."""


class MTPKeys(Section):
    """Keys of the objective."""

    section: ClassVar[str] = "objective"
    may_change: ClassVar[tuple[str, ...]] = ("mtp_weight",)

    mtp_weight: PositiveFloat = 0.3
    """Factor of the loss of multi-token prediction, a mean over the depths, for models with ``n_mtp_layers``."""
