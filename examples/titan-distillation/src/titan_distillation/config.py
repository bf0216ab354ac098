"""The config section of titan-distillation."""

from typing import ClassVar

from pydantic import Field

from titan_core.api import AnyPath, Section, Share


class DistillationSection(Section):
    section: ClassVar[str] = "distillation"

    teacher: AnyPath | None = None
    """The teacher: a checkpoint or a run of Titan, or a folder of weights."""
    temperature: float = Field(default=2.0, gt=0.0, le=100.0)
    """The logits of both models are divided by it."""
    share: Share = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the divergence from the teacher in the loss; the rest is the cross entropy of the next token."""
