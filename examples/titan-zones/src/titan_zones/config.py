"""The config section of titan-zones."""

from typing import ClassVar

from pydantic import Field

from titan_core.api import Ranks, Section


class ZonesSection(Section):
    section: ClassVar[str] = "zones"

    count: Ranks = Field(default=1, gt=0)
    """Number of zones that the ranks are divided into. Each zone holds the whole model."""
