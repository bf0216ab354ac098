"""The config section of titan-lora."""

from typing import ClassVar

from pydantic import Field

from titan_core.api import NonNegativeInt, PositiveFloat, Section


class LoRASection(Section):
    section: ClassVar[str] = "lora"

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: none."""
    alpha: PositiveFloat = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: list[str] = Field(default=["*"], min_length=1)
    """Patterns of the linear layers of blocks that have an adapter."""
