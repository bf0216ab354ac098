"""Llama 3.1 (arXiv 2407.21783, section 3.2), written for one device, without parallelism.

Shape suffixes in comments: B batch, S sequence, D width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from titan_models_llama.config import LlamaArgs, RopeScaling
from titan_nn.decoder import DecoderBlock, FeedForward, GroupedQueryAttention
from titan_nn.rotary import frequencies, rotary_table, rotate_neighbours


class Llama(nn.Module):
    """Token ids to logits."""

    rope: Tensor

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict(
            {
                str(index): DecoderBlock(
                    args, GroupedQueryAttention(args, rotate_neighbours), FeedForward(args.dim, args.ffn_dim)
                )
                for index in range(args.n_layers)
            }
        )
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        # Cosines and sines by position. The layout computes them (rope_table), so checkpoints do not contain them.
        self.register_buffer("rope", torch.empty(args.max_seq_len, 2, args.head_dim // 2), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """``tokens``, ``positions`` (default ``0 .. S - 1``) and ``documents`` (default: one) are B S, logits B S V."""
        h = self.tok_embeddings(tokens)  # B S D
        rope = self.rope[: h.shape[1]] if positions is None else self.rope[positions]
        for layer in self.layers.values():
            h = layer(h, rope, documents)
        return self.output(self.norm(h))


def rope_table(args: LlamaArgs) -> Tensor:
    """Return the cosines and sines of all positions: fp32 ``[max_seq_len, 2, head_dim / 2]``."""
    angles = frequencies(args.head_dim, args.rope_theta)
    if args.rope_scaling is not None:
        angles = scale_frequencies(angles, args.rope_scaling)
    return rotary_table(angles, args.max_seq_len)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return ``frequencies``, with those divided whose wavelengths do not fit into the original context.

    The operations have the order of Llama 3.1's published code, so that they round alike
    (:func:`titan_nn.rotary.frequencies`).
    """
    original, low, high = scaling.original_max_seq_len, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    kept = (original / wavelengths - low) / (high - low)
    blended = (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
    scaled = torch.where(wavelengths > original / low, slowed, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)
