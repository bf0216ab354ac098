"""What zones do to a model."""

from titan_core.api.model_part import ModelPart, TransformContext


def apply(part: ModelPart, context: TransformContext) -> ModelPart:
    """Nothing: data parallelism sums gradients over the mesh dimension, since it divides the batch."""
    return part
