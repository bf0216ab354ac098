"""The config section of titan-local-sgd."""

from typing import ClassVar

from pydantic import Field

from titan_core.api import PositiveFloat, PositiveInt, Ranks, Section


class LocalSGDSection(Section):
    section: ClassVar[str] = "local_sgd"

    islands: Ranks = Field(default=1, gt=0)
    """Number of diverging replicas of the model."""
    sync_every: PositiveInt = 20
    """Steps between synchronisations of the islands."""
    outer_lr: PositiveFloat = 0.7
    """Learning rate of the outer optimizer. A rate of 1 without momentum averages the islands' weights."""
    outer_momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Nesterov momentum of the outer optimizer."""
