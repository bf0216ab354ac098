"""The config section of titan-objective-z-loss."""

from typing import ClassVar

from pydantic import Field

from titan_core.api.section import Section


class ZLossSection(Section):
    section: ClassVar[str] = "z_loss"

    coefficient: float = Field(default=1e-4, ge=0.0, le=1.0)
    """How much the square of the logarithm of the softmax's normaliser adds to the loss of a token."""
