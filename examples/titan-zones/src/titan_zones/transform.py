"""What zones do to a model."""

from titan_core.api.build_context import TrainingContext
from titan_core.api.model_part import ModelPart
from titan_zones.config import ZonesSection


def apply(part: ModelPart, context: TrainingContext[ZonesSection]) -> ModelPart:
    """Nothing: data parallelism sums gradients over the mesh dimension, since it divides the batch."""
    return part
