"""Fake quantisation with straight-through gradients, and the linear layer that applies it to its weight."""

import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import ModelPart, Row, TrainingContext
from titan_int8_qat.config import Int8QATSection


def apply(part: ModelPart, context: TrainingContext[Int8QATSection]) -> ModelPart:
    """Convert every linear layer that the layout allows to be divided. Names and parameters do not change."""
    bits = context.section.bits
    for name, module in part.named_modules():
        if type(module) is nn.Linear and part.layout.divides_linear(name):
            module.__class__ = QuantizedLinear
            module.bits = bits
            module.dim = 0 if isinstance(part.layout.rule(f"{name}.weight"), Row) else 1
    return part


class QuantizedLinear(nn.Linear):
    """A linear layer that rounds its weight to ``bits`` bits in each forward pass."""

    bits: int
    dim: int
    """Dimension along which elements share a scale: the one that tensor parallelism does not shard."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, fake_quantize(self.weight, self.bits, self.dim), self.bias)


def fake_quantize(weight: Tensor, bits: int, dim: int) -> Tensor:
    """Round ``weight`` to a grid of integers, with a scale for the elements along ``dim``. The gradient passes to ``weight``
    unchanged."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.detach().abs().amax(dim, keepdim=True).clamp(min=1e-12) / largest
    rounded = (weight.detach() / scale).round() * scale
    return weight + (rounded - weight.detach())
