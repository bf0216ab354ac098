"""The transform of zones, which leaves the model unchanged."""

from titan_core.api import ModelPart, TrainingContext
from titan_zones.config import ZonesSection


def apply(part: ModelPart, context: TrainingContext[ZonesSection]) -> ModelPart:
    """Return ``part`` unchanged. Data parallelism sums gradients over zones, because their dimension divides the batch."""
    return part
