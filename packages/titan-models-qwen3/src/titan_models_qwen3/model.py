"""Qwen3 (arXiv 2505.09388, section 2): Llama with RMSNorms of the queries and keys of each head."""

from __future__ import annotations

from torch import Tensor

from titan_core.toolkit.decoder import FeedForward
from titan_core.toolkit.rotary import frequencies, rotary_table
from titan_models_qwen3.config import Qwen3Args
from titan_models_qwen3.mtp_model import PredictingDecoder


class Qwen3(PredictingDecoder):
    """Token ids to logits."""

    def __init__(self, args: Qwen3Args) -> None:
        super().__init__(args, lambda index: FeedForward(args.dim, args.ffn_dim))


def rope_table(args: Qwen3Args) -> Tensor:
    """Return the cosines and sines of all positions: fp32 ``[max_seq_len, 2, head_dim / 2]``."""
    return rotary_table(frequencies(args.head_dim, args.rope_theta), args.max_seq_len)
