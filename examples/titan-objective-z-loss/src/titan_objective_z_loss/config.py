"""The config section of titan-objective-z-loss."""

from typing import ClassVar

from pydantic import Field

from titan_core.api import Section


class ZLossSection(Section):
    section: ClassVar[str] = "z_loss"

    coefficient: float = Field(default=1e-4, ge=0.0, le=1.0)
    """Weight of the penalty: each token's loss increases by this times the squared logarithm of the softmax normaliser."""
