"""Dropout (Srivastava et al., JMLR 2014) with the same masks on any mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api.model.random_streams import RandomStream, Words, element_bits, element_bits_into

_PART = (1 << 15) - 1
"""Number of elements to process at a time on the CPU: few enough to stay in its cache, and to keep torch from splitting each
operation over threads, which would synchronise after each one."""
_ONE = 0x3F800000
"""The bits of 1.0 in fp32."""


class Dropout(RandomStream):
    """Replacement for ``nn.Dropout``: in training, zero each element of ``[batch, seq, features...]`` with probability ``p``
    and scale the others by ``1 / (1 - p)``.

    :class:`~titan_core.api.RandomStream` describes what the masks depend on. In a model that is called
    outside a run, it draws from torch's generator, as ``nn.Dropout`` does. Nothing is saved for backward: the mask is
    recomputed.

    Raises:
        ValueError: ``p`` is not a probability.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p must be between 0 and 1, not {p}")
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` with dropout applied; in evaluation, ``hidden`` itself."""
        if not self.training or self.p == 0.0:
            return hidden
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
        """Return the text for ``print(model)``."""
        return f"p={self.p}"


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, elements: Tensor, first: Tensor, second: Tensor, features: Tensor, kept: int, scale: float
    ) -> Tensor:
        ctx.save_for_backward(first, second, features)
        ctx.kept, ctx.scale = kept, scale
        kernel = _KERNELS.get(elements.device.type, _masked)
        return kernel(elements, (first, second, features), kept, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dropped: Tensor = _Dropped.apply(gradients[0], *ctx.saved_tensors, ctx.kept, ctx.scale)
        return dropped, None, None, None, None, None


def _masked(elements: Tensor, words: Words, kept: int, scale: float) -> Tensor:
    """Multiply ``elements``, ``[tokens, features]``, by ``scale`` where an element's bits are below ``kept``, and by 0
    elsewhere. Computes in at least fp32. All kernels return the same result bit for bit."""
    mask = (element_bits(words) < kept).float()
    return (elements * mask * scale).to(elements.dtype)


def _masked_in_parts(elements: Tensor, words: Words, kept: int, scale: float) -> Tensor:
    """Compute :func:`_masked` on a CPU. A dozen operations on cache-sized parts are faster than one on the whole tensor."""
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
        # Comparisons are not vectorised. Instead, spread the sign of the difference over all bits and select those of 1.0.
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
    """Compute :func:`_masked` on a GPU, fused if Triton is installed."""
    return _fused()(elements, words, kept, scale)


_KERNELS: dict[str, Callable[..., Tensor]] = {"cpu": _masked_in_parts, "cuda": _masked_in_one_kernel}
