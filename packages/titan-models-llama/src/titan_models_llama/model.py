"""Llama 3.1 (arXiv 2407.21783, section 3.2)."""

from __future__ import annotations

from titan_core.toolkit.decoder import Decoder, DecoderBlock, FeedForward, GroupedQueryAttention
from titan_core.toolkit.rotary import rotate_neighbours
from titan_models_llama.config import LlamaArgs


class Llama(Decoder):
    """Token ids to logits."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__(
            args,
            (
                DecoderBlock(args, GroupedQueryAttention(args, rotate_neighbours), FeedForward(args.dim, args.ffn_dim))
                for _ in range(args.n_layers)
            ),
        )
