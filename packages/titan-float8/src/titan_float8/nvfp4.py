"""Linear layers in NVFP4: 4 bits with a scale for each 16 numbers, as NVIDIA pre-trains (arXiv 2509.25149, section 3).

Numbers, ``e2m1``, have a scale of their block, ``e4m3``, and one of their matrix, fp32. Blocks are 16 features of a row, or
16 tokens in the gradient of a weight; those of weights are 16 x 16, so that a weight is the same in both products that read
it. Gradients are rounded stochastically, everything else to the nearest number. For the gradient of a weight, blocks of 16
tokens are multiplied by a Hadamard matrix with random signs, which spreads outliers and cancels in the product.

Numbers equal those of ``torchao`` (``nvfp4_quantize``), whose kernels for training need a Blackwell GPU and draw from its
generator. Two choices make them the same on every mesh. The scale of a matrix is a power of two, the next above that of
torchao: blocks are then rounded alike whatever else the matrix has, unless they are some 10,000 times smaller than its
largest. And random bits are those of an element's place in the global batch (:class:`~titan_core.api.RandomStream`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import RandomStream
from titan_core.api.model.random_streams import element_bits
from titan_float8.config import MXSection
from titan_float8.layers import ConvertedLinear
from titan_float8.torchao_prototypes import (
    E4M3_EPS,
    f4_unpacked_to_f32,
    f32_to_f4_unpacked,
    pack_uint4,
    per_tensor_amax_to_scale,
    to_blocked,
)

BLOCK = 16
"""Number of elements that share a scale."""
_TOKENS = 32
"""The kernels contract multiples of so many numbers; sequences are filled up with zeros."""
_LARGEST, _LARGEST_SCALE, _LEAST = 6.0, 448.0, 2.0**-100
_SIGNS = 0b1011000110100111
"""Signs of the Hadamard matrix's rows, the same for all layers and steps."""


class NVFP4Linear(ConvertedLinear):
    """A linear layer that computes its three matmuls, forward and backward, in NVFP4.

    Under tensor parallelism, its weight is this rank's shard. No block crosses ranks, so scales of blocks are the same.
    """

    rounding: RandomStream

    @classmethod
    def from_linear(cls, layer: nn.Linear, section: MXSection) -> NVFP4Linear:
        """Return a layer that shares the parameters of ``layer``."""
        converted = super().from_linear(layer, section)
        converted.rounding = RandomStream()
        converted.rounding.expect(layer.out_features)
        return converted

    def _matmul(self, input: Tensor, weight: Tensor) -> Tensor:
        words = None
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            words = self.rounding.words(input.new_empty(()).expand(*input.shape[:-1], weight.shape[0]))
        exact, emulate = self.weight_gradient_in_high_precision, self.emulate
        result: Tensor = _Product.apply(input, weight, exact, emulate, *(words or (None, None, None)))
        return result


@dataclass(frozen=True)
class ScaledBlocks:
    """A matrix in NVFP4."""

    values: Tensor
    """Numbers of e2m1, fp32 ``[rows, columns]``."""
    scales: Tensor
    """Of each block, e4m3."""
    scale: Tensor
    """Of the matrix, fp32: a power of two."""
    rows: int
    """Rows of a block. It has 16 columns."""

    @property
    def mT(self) -> ScaledBlocks:
        """The transpose of a matrix with square blocks."""
        assert self.rows == BLOCK
        return ScaledBlocks(self.values.mT, self.scales.mT, self.scale, self.rows)

    def exact(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers. A power of two times 2 and 4 bits of mantissa: no type rounds them."""
        scales = (self.scales.float() * self.scale).repeat_interleave(self.rows, 0)
        return (self.values.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2).to(dtype)

    def packed(self) -> tuple[Tensor, list[Tensor]]:
        """Return the numbers, two in a byte, and the scales in the order in which kernels read them."""
        low = pack_uint4(f32_to_f4_unpacked(self.values.contiguous())).view(torch.float4_e2m1fn_x2)
        # Bytes: not all operators have the type of scales.
        scales = self.scales.view(torch.uint8).repeat_interleave(self.rows, 0)
        return low, [to_blocked(scales).view(self.scales.dtype), self.scale]


def quantize(matrix: Tensor, rows: int = 1, bits: Tensor | None = None) -> ScaledBlocks:
    """Return ``matrix`` in NVFP4.

    Args:
        matrix: ``[rows, columns]``, multiples of a block's.
        rows: rows of a block.
        bits: 15 random bits of each element, to round stochastically; ``None``: to the nearest number.
    """
    blocks = matrix.float().unflatten(-1, (-1, BLOCK)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax((1, 3))
    whole = _next_power_of_two(per_tensor_amax_to_scale(largest.amax()).clamp(min=_LEAST))
    scales = (largest / _LARGEST / whole).clamp(E4M3_EPS, _LARGEST_SCALE).to(torch.float8_e4m3fn)
    factors = (1.0 / whole) / scales.float()  # in torchao's order
    scaled = (blocks * factors[:, None, :, None]).clamp(-_LARGEST, _LARGEST).view(matrix.shape)
    if bits is None:
        return ScaledBlocks(f4_unpacked_to_f32(f32_to_f4_unpacked(scaled)), scales, whole, rows)
    size = scaled.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))  # between neighbours among e2m1's numbers
    rounded = torch.floor(size / step + (bits.float() + 0.5) * 2.0**-15).mul(step).clamp(max=_LARGEST)
    return ScaledBlocks(torch.copysign(rounded, scaled), scales, whole, rows)


def _next_power_of_two(number: Tensor) -> Tensor:
    """Return the least power of two that is at least ``number``, which is fp32 and positive; infinity is kept."""
    return ((number.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def hadamard(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the Hadamard matrix of 16 rows, orthonormal, with the signs of its rows: made on the device, for which the host
    does not wait."""
    index = torch.arange(BLOCK, device=device)
    common = index[:, None] & index
    parity = (common ^ (common >> 1) ^ (common >> 2) ^ (common >> 3)) & 1
    signs = (_SIGNS >> index) & 1
    return (1 - 2 * (parity ^ signs[:, None])).to(dtype) / 4


def spread(tokens: Tensor) -> Tensor:
    """Return ``tokens``, ``[batch, seq, features]``, by feature, ``[features, tokens]``: sequences are filled up, and each
    block of 16 of their tokens is multiplied by :func:`hadamard`."""
    by_feature = _filled(tokens).flatten(0, 1).mT.unflatten(1, (-1, BLOCK))
    return (by_feature @ hadamard(tokens.device, tokens.dtype)).flatten(1)


def _filled(tokens: Tensor) -> Tensor:
    return F.pad(tokens, (0, 0, 0, -tokens.shape[1] % _TOKENS))


def multiply(left: ScaledBlocks, right: ScaledBlocks, dtype: torch.dtype, emulate: bool) -> Tensor:
    """Return ``left @ right.mT``."""
    if emulate:
        return left.exact(dtype) @ right.exact(dtype).mT
    (low, scales), (other, others) = left.packed(), right.packed()
    kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    order = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    result: Tensor = F.scaled_mm(low, other.mT, scales, kinds, others, kinds, order, order, output_dtype=torch.bfloat16)
    return result.to(dtype)


class _Product(torch.autograd.Function):
    """``hidden @ weight.mT``. Backward casts both again: FSDP can free the weight meanwhile."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, exact: bool, emulate: bool, *words: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight, *words)
        ctx.exact, ctx.emulate = exact, emulate
        rows = quantize(hidden.reshape(-1, hidden.shape[-1]))
        return multiply(rows, quantize(weight, BLOCK), hidden.dtype, emulate).view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, *words = ctx.saved_tensors
        dtype, features = gradient.dtype, gradient.shape[-1]
        bits = _bits(gradient, words)
        to_input = to_weight = None
        if ctx.needs_input_grad[0]:
            rows = quantize(gradient.reshape(-1, features), bits=bits & 0x7FFF)
            to_input = multiply(rows, quantize(weight, BLOCK).mT, dtype, ctx.emulate).view(hidden.shape)
        if ctx.needs_input_grad[1] and ctx.exact:
            to_weight = gradient.reshape(-1, features).mT @ hidden.reshape(-1, hidden.shape[-1])
        elif ctx.needs_input_grad[1]:
            one = (1, -1) if gradient.dim() < 3 else (-1, gradient.shape[-2])  # sequences, and their positions
            others = _filled((bits >> 16).view(*one, features)).flatten(0, 1).mT
            columns = quantize(spread(gradient.reshape(*one, features)), bits=others)
            rows = quantize(spread(hidden.reshape(*one, hidden.shape[-1])))
            to_weight = multiply(columns, rows, dtype, ctx.emulate)
        return to_input, to_weight, None, None, None, None, None


def _bits(gradient: Tensor, words: list[Tensor | None]) -> Tensor:
    """Return 31 random bits of each element, ``[tokens, features]``; outside a run, of torch's generator."""
    if words[0] is None:
        shape = (gradient[..., 0].numel(), gradient.shape[-1])
        return torch.randint(0, 2**31 - 1, shape, dtype=torch.int32, device=gradient.device)
    found: Any = tuple(words)
    return element_bits(found)
