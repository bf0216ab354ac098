"""Dropout (Srivastava et al., JMLR 2014) whose masks are the same on any mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_core.api.random_bits import Words, element_bits, element_bits_into
from titan_core.api.random_streams import RandomStream, like_dtensor

_PART = (1 << 15) - 1
"""Elements that are computed at a time on the CPU: so few that they stay in its cache, and that torch divides no operation
over threads, which would wait for each other after each."""
_ONE = 0x3F800000
"""The bits of 1.0 in fp32."""


class Dropout(RandomStream):
    """In place of ``nn.Dropout``: in training, each element of ``[batch, seq, features...]`` is zeroed with probability
    ``p``, and the others are scaled by ``1 / (1 - p)``.

    See :class:`~titan_core.api.random_streams.RandomStream` for what the masks depend on. In a model that is called by hand
    it draws from torch's generator, as ``nn.Dropout`` does. Nothing is kept for backward: the mask is computed again.

    Raises:
        ValueError: ``p`` is no probability.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p must be between 0 and 1, not {p}")
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``, with zeros; itself in evaluation."""
        if not self.training or self.p == 0.0:
            return hidden
        if isinstance(hidden, DTensor):
            return like_dtensor(hidden, self.forward(hidden.to_local()))
        words = self.words(hidden)
        if words is None:
            return F.dropout(hidden, self.p)
        kept = min(round((1.0 - self.p) * 2**31), 2**31 - 1)
        scale = 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)
        elements = hidden.reshape(-1, words[2].shape[0])
        if torch.compiler.is_compiling():
            return _masked(elements, words, kept, scale).view(hidden.shape)
        dropped: Tensor = _Dropped.apply(elements, *words, kept, scale)
        return dropped.view(hidden.shape)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"p={self.p}"


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, elements: Tensor, one: Tensor, other: Tensor, features: Tensor, kept: int, scale: float) -> Tensor:
        ctx.save_for_backward(one, other, features)
        ctx.kept, ctx.scale = kept, scale
        kernel = _KERNELS.get(elements.device.type, _masked)
        return kernel(elements, (one, other, features), kept, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dropped: Tensor = _Dropped.apply(gradients[0], *ctx.saved_tensors, ctx.kept, ctx.scale)
        return dropped, None, None, None, None, None


def _masked(elements: Tensor, words: Words, kept: int, scale: float) -> Tensor:
    """``elements``, ``[tokens, features]``, times ``scale`` where an element's bits are below ``kept``, else times 0; the
    product in fp32 at least. All kernels compute the same, bit for bit."""
    mask = (element_bits(words) < kept).float()
    return (elements * mask * scale).to(elements.dtype)


def _masked_in_parts(elements: Tensor, words: Words, kept: int, scale: float) -> Tensor:
    """:func:`_masked` on a CPU: a dozen operations on what fits into the cache take less time than one on all of it."""
    tokens, features = elements.shape
    rows = max(1, _PART // max(1, features))
    result = torch.empty_like(elements, memory_format=torch.contiguous_format)
    bits = torch.empty(min(rows, tokens), features, dtype=torch.int32)
    scratch = torch.empty_like(bits)
    for first in range(0, tokens, rows):
        part = slice(first, min(first + rows, tokens))
        size = part.stop - first
        own = bits[:size]
        element_bits_into(own, scratch[:size], (words[0][part], words[1][part], words[2]))
        # Without a comparison, which is not vectorised: the sign of the difference, on all bits, and those of 1.0.
        mask = own.sub_(kept).bitwise_right_shift_(31).bitwise_and_(_ONE).view(torch.float32)
        if elements.dtype == torch.float32:
            torch.mul(elements[part], mask, out=result[part]).mul_(scale)
        else:
            result[part] = (elements[part] * mask).mul_(scale)
    return result


@functools.cache
def _fused() -> Callable[..., Tensor]:
    return torch.compile(_masked, dynamic=True) if find_spec("triton") else _masked


def _masked_in_one_kernel(elements: Tensor, words: Words, kept: int, scale: float) -> Tensor:
    """:func:`_masked` on a GPU, fused where there is Triton."""
    return _fused()(elements, words, kept, scale)


_KERNELS: dict[str, Callable[..., Tensor]] = {"cpu": _masked_in_parts, "cuda": _masked_in_one_kernel}
