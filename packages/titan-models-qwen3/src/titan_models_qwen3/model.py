"""Qwen3 (arXiv 2505.09388, section 2): Llama with RMSNorms of the queries and keys of each head."""

from __future__ import annotations

from torch import Tensor

from titan_core.toolkit.decoder import Decoder, DecoderBlock, FeedForward, GroupedQueryAttention
from titan_core.toolkit.rotary import frequencies, rotary_table, rotate_halves
from titan_models_qwen3.config import Qwen3Args


class Qwen3(Decoder):
    """Token ids to logits."""

    def __init__(self, args: Qwen3Args) -> None:
        super().__init__(
            args,
            (
                DecoderBlock(
                    args, GroupedQueryAttention(args, rotate_halves, head_norms=True), FeedForward(args.dim, args.ffn_dim)
                )
                for _ in range(args.n_layers)
            ),
        )


def rope_table(args: Qwen3Args) -> Tensor:
    """Return the cosines and sines of all positions: fp32 ``[max_seq_len, 2, head_dim / 2]``."""
    return rotary_table(frequencies(args.head_dim, args.rope_theta), args.max_seq_len)
