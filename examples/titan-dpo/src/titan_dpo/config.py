"""The config section of titan-dpo."""

from typing import ClassVar

from pydantic import Field

from titan_core.api import Section


class DPOSection(Section):
    section: ClassVar[str] = "dpo"

    beta: float = Field(default=0.1, gt=0.0, le=100.0)
    """Strength of the pull towards the reference policy: the reward of an answer is this times the logarithm of the ratio of
    its probabilities under the two policies."""
