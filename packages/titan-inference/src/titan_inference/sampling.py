"""Choosing the next token from logits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. The filters apply in the order of the fields, as in Hugging Face's ``generate``."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token (greedy)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least p (Holtzman et al.,
    arXiv 1904.09751)."""
    min_p: float = 0.0
    """Keep tokens with at least p times the probability of the most likely one (Nguyen et al., arXiv 2407.01082)."""
    seed: int = 0
    """Together with a sequence's index and length, seeds its draws: neither the batch nor the mesh changes a sample."""


class Sampler:
    """Draws tokens for a batch of sequences."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options

    def __call__(self, logits: Tensor, lengths: list[int]) -> Tensor:
        """
        Args:
            logits: ``[batch, vocab]``.
            lengths: tokens that each sequence has so far.

        Returns:
            Token ids on the host, ``[batch]``.
        """
        options = self._options
        # On the host in fp32: the same draws on every device.
        logits = logits.float().cpu()
        if options.temperature == 0:
            return logits.argmax(-1)
        probabilities = filtered(logits / options.temperature, options).softmax(-1)
        noise = torch.stack([self._noise(index, length, logits.shape[-1]) for index, length in enumerate(lengths)])
        # The largest of p / e, with e exponentially distributed, is a draw from p: one pass without a cumulative sum.
        return (probabilities / noise).argmax(-1)

    def _noise(self, index: int, length: int, size: int) -> Tensor:
        digest = hashlib.sha256(f"{self._options.seed}:{index}:{length}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(size).exponential_(generator=generator)


def filtered(logits: Tensor, options: SamplingOptions) -> Tensor:
    """``logits``, ``[batch, vocab]``, with minus infinity for tokens that the options exclude."""
    if options.top_k:
        kth = logits.topk(min(options.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if options.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        excluded = (before >= options.top_p).scatter(-1, order, before >= options.top_p)
        excluded.scatter_(-1, order[..., :1], False)  # the most likely token always remains
        logits = logits.masked_fill(excluded, float("-inf"))
    if options.min_p > 0.0:
        probabilities = logits.softmax(-1)
        least = options.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, float("-inf"))
    return logits
