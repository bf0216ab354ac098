"""Qwen3 (arXiv 2505.09388, section 2): Llama with RMSNorms of the queries and keys of each head. Written for one device,
without parallelism.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) adds blocks, which predict further tokens. The block of
depth ``k`` (1, 2 ...) combines the states of depth ``k - 1`` (depth 0: those of the last block), before the final norm, with
the embedding of the token ``k`` positions later, and predicts the token after that. Embedding and output layer are those of
the model.

A model that receives the later tokens embeds them together with its own, as further sequences of the batch. They follow it
through the model in the hidden states: B sequences, then B of each depth. Those of a depth are embeddings until its block
replaces them, so a pipeline may cut the model anywhere, and one call of each module embeds, norms and projects all depths.

Shape suffixes in comments: B batch, S sequence, D width, K depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_models_qwen3.config import Qwen3Args
from titan_nn.decoder import DecoderBlock, FeedForward, GroupedQueryAttention
from titan_nn.rotary import frequencies, rotary_table, rotate_halves


class Qwen3(nn.Module):
    """Token ids to logits.

    Args:
        args: sizes of the model.
        feed_forward: makes the feed-forward layer of a block, by its number; ``None``: SwiGLU.
    """

    rope: Tensor

    def __init__(self, args: Qwen3Args, feed_forward: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.n_layers, self.depths = args.n_layers, args.n_mtp_layers
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict()
        for index in range(args.num_blocks):
            kind = DecoderBlock if index < args.n_layers else PredictingBlock
            attention = GroupedQueryAttention(args, rotate_halves, head_norms=True)
            ffn = FeedForward(args.dim, args.ffn_dim) if feed_forward is None else feed_forward(index)
            self.layers[str(index)] = kind(args, attention, ffn)
        self.norm = FinalNorm(args) if args.n_mtp_layers else nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        # Cosines and sines by position. The layout computes them (rope_table), so checkpoints do not contain them.
        self.register_buffer("rope", torch.empty(args.max_seq_len, 2, args.head_dim // 2), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        mtp_tokens: Tensor | None = None,
    ) -> Tensor:
        """``tokens``, ``positions`` (default ``0 .. S - 1``) and ``documents`` (default: one) are B S, logits B S V.

        With the later tokens ``mtp_tokens``, B S K, logits are (1 + K)B S V: those of the next token, then those of each
        depth. A model that is not trained, such as a teacher, ignores these tokens.
        """
        if mtp_tokens is None or not any(parameter.requires_grad for parameter in self.parameters()):
            h = self.tok_embeddings(tokens)  # B S D
            rope = self.rope[: h.shape[1]] if positions is None else self.rope[positions]
            for block in self.layers.values():
                h = block(h, rope, documents)
            return self.output(self.norm(h))
        if not tokens.is_floating_point():  # what comes from an earlier stage of a pipeline is embedded already
            tokens = torch.cat((tokens, *mtp_tokens.unbind(-1)))
        h, *later = self.tok_embeddings(tokens).chunk(1 + self.depths)
        rope = self.rope[: h.shape[1]] if positions is None else self.rope[positions]
        blocks = list(self.layers.values())
        for block in blocks[: self.n_layers]:
            h = block(h, rope, documents)
        states = [h]
        for block, embedded in zip(blocks[self.n_layers :], later, strict=True):
            states.append(block(embedded, rope, documents, states[-1]))
        return self.output(self.norm(torch.cat(states), self.depths))


class PredictingBlock(DecoderBlock):
    """The block of a depth. Names are those of DeepSeek-V3's files."""

    def __init__(self, args: Qwen3Args, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__(args, attention, feed_forward)
        self.enorm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.hnorm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None, previous: Tensor | None = None) -> Tensor:
        """B S D to B S D.

        Args:
            x: embeddings of the later tokens.
            previous: states of the depth before; ``None``: nothing is predicted, and ``x`` is returned.
        """
        if previous is None:
            return x
        return super().forward(self.eh_proj(torch.cat((self.enorm(x), self.hnorm(previous)), -1)), rope, documents)


class FinalNorm(nn.RMSNorm):
    """The final norm of the model, and one for each depth."""

    def __init__(self, args: Qwen3Args) -> None:
        super().__init__(args.dim, eps=args.norm_eps)
        self.mtp = nn.ModuleList(nn.RMSNorm(args.dim, eps=args.norm_eps) for _ in range(args.n_mtp_layers))

    def forward(self, x: Tensor, depths: int = 0) -> Tensor:
        """B S D, B sequences for the model and for each of ``depths``, to the same."""
        if not depths:
            return super().forward(x)
        first, *others = x.chunk(1 + depths)
        return torch.cat((super().forward(first), *(norm(one) for norm, one in zip(self.mtp, others, strict=True))))


def rope_table(args: Qwen3Args) -> Tensor:
    """Return the cosines and sines of all positions: fp32 ``[max_seq_len, 2, head_dim / 2]``."""
    return rotary_table(frequencies(args.head_dim, args.rope_theta), args.max_seq_len)
