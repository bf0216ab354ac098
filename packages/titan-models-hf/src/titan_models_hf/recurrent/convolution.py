"""Causal convolution of each feature over the positions of a sequence, within documents, divided or a token at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import SequenceShare, current_decoding


class CausalConvolution(nn.Module):
    """A mixer: position ``t`` of each feature becomes ``bias + sum(weight[i] * x[t - reach + i])``, a sum over the last
    ``reach + 1`` positions of its document.

    Args:
        features: number of features.
        width: ``reach + 1``.
    """

    def __init__(self, features: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, 1, width))
        self.bias = nn.Parameter(torch.empty(features)) if bias else None

    @property
    def reach(self) -> int:
        """Number of earlier positions that a position sees."""
        return self.weight.shape[-1] - 1

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """
        Args:
            x: ``[batch, seq, features]``.
            documents: document of each position, ``[batch, seq]``.
        """
        decoding = current_decoding()
        if decoding is None:
            return self.convolve(
                F.pad(x, (0, 0, self.reach, 0)), None if documents is None else _padded(documents, self.reach)
            )
        kept, real = decoding.state(self), decoding.real
        before = kept.get("inputs", x.new_zeros(x.shape[0], self.reach, x.shape[2]))
        inputs = torch.cat((before, x), dim=1)
        # The last real positions of each sequence, which need not be the last.
        last = real.sum(dim=1, keepdim=True) + torch.arange(self.reach, device=x.device)
        kept["inputs"] = inputs.gather(1, last[..., None].expand(-1, -1, x.shape[2]))
        return self.convolve(inputs, None)

    def convolve(self, x: Tensor, documents: Tensor | None) -> Tensor:
        """Return the results of all but the first :attr:`reach` positions of ``x``."""
        seq = x.shape[1] - self.reach
        if documents is None:
            return F.conv1d(x.transpose(1, 2), self.weight, self.bias, groups=len(self.weight)).transpose(1, 2)
        result = torch.zeros_like(x[:, self.reach :]) if self.bias is None else self.bias.expand(x.shape[0], seq, -1)
        for place in range(self.reach + 1):
            same = documents[:, place : place + seq] == documents[:, self.reach :]
            result = result + self.weight[:, 0, place] * x[:, place : place + seq] * same[..., None]
        return result


def _padded(documents: Tensor, reach: int) -> Tensor:
    """Return ``documents`` after ``reach`` positions of no document."""
    return F.pad(documents, (reach, 0), value=-1)


def divided(module: CausalConvolution, share: SequenceShare) -> Callable[..., Tensor]:
    """Return the mixer's forward if each rank has some chunks of every sequence: ranks exchange the ends of their chunks."""

    def forward(x: Tensor, documents: Tensor | None = None) -> Tensor:
        chunks, reach = x.chunk(len(share.own), dim=1), module.reach
        size = chunks[0].shape[1]
        held = min(reach, size)  # a reach beyond the preceding chunk takes the ends of several
        ends = share.gather(torch.cat([chunk[:, size - held :] for chunk in chunks], dim=1), dim=1)
        ids = None if documents is None else _padded(documents, reach)
        ends = F.pad(ends, (0, 0, reach, 0))
        results = []
        for index, chunk in zip(share.own, chunks, strict=True):
            before = ends[:, index * held : index * held + reach]
            own = None if ids is None else ids[:, index * size : (index + 1) * size + reach]
            results.append(module.convolve(torch.cat((before, chunk), dim=1), own))
        return torch.cat(results, dim=1)

    return forward
