"""A small mixture-of-experts decoder, for one device.

Shapes: b sequences, s positions, d width of the hidden states, n = b * s tokens, k experts per token, e experts.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import CausalAttention, add_statistic
from titan_model_moe.config import MoEArgs


class Attention(nn.Module):
    def __init__(self, args: MoEArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.q = nn.Linear(args.dim, args.dim, bias=False)
        self.k = nn.Linear(args.dim, args.dim, bias=False)
        self.v = nn.Linear(args.dim, args.dim, bias=False)
        self.out = nn.Linear(args.dim, args.dim, bias=False)
        self.mixer = CausalAttention()

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (linear(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.out(self.mixer(q, k, v, documents).transpose(1, 2).reshape(batch, seq, -1))


class Router(nn.Module):
    """Chooses the experts of each token from that token alone. Computes in fp32, because a small difference may select
    another expert."""

    def __init__(self, args: MoEArgs) -> None:
        super().__init__()
        self.top_k = args.top_k
        self.weight = nn.Parameter(torch.empty(args.n_experts, args.dim))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route ``tokens``, ``[n, d]``.

        Returns:
            The weights of the chosen experts, fp32 ``[n, k]``, which sum to 1; their indices, ``[n, k]``; and the
            probabilities of all experts, fp32 ``[n, e]``.
        """
        probabilities = F.linear(tokens.float(), self.weight.float()).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen, probabilities


class Experts(nn.Module):
    """Gated feed-forward layers (SwiGLU), stacked: the first dimension of each parameter is the expert."""

    def __init__(self, args: MoEArgs) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(args.n_experts, args.dim, args.expert_dim))
        self.up = nn.Parameter(torch.empty(args.n_experts, args.dim, args.expert_dim))
        self.down = nn.Parameter(torch.empty(args.n_experts, args.expert_dim, args.dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """
        Args:
            rows: ``[rows, d]``, sorted by expert. Those after the last counted one belong to no expert.
            counts: number of rows of each expert, int64 ``[e]``.

        Returns:
            A tensor of the same shape as ``rows``.
        """
        used = counts.tolist()
        *pieces, unused = rows.split([*used, rows.shape[0] - sum(used)])
        weights = zip(pieces, self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        # Experts without rows compute too, so that every expert always has a gradient.
        outputs = [(F.silu(piece @ gate) * (piece @ up)) @ down for piece, gate, up, down in weights]
        return torch.cat([*outputs, torch.zeros_like(unused)])


Balance = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(result ``[b, s, d]``, probabilities ``[b, s, e]``, chosen experts ``[b, s, k]``) -> the result, with a loss attached."""


class FeedForward(nn.Module):
    """Sends each token through ``k`` experts. No expert drops tokens. Counts the rows of each expert."""

    def __init__(self, args: MoEArgs, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.router = Router(args)
        self.experts = Experts(args)
        self.n_experts = args.n_experts
        self.balance: Balance | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen, probabilities = self.router(tokens)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        counts = (pairs[:, None] == torch.arange(self.n_experts, device=x.device)).sum(0)
        # Make one row for each pair of token and expert, by copies and permutations. Unlike index_add, these are
        # deterministic on a GPU.
        rows = tokens[:, None].expand(-1, weights.shape[1], -1).flatten(0, 1)
        outputs = self.experts(rows[order], counts)[order.argsort()].unflatten(0, weights.shape)
        result = (outputs * weights[..., None].to(outputs.dtype)).sum(1).view_as(x)
        result = add_statistic(result, "expert_rows", counts, index=self.layer)
        if self.balance is None:
            return result
        return self.balance(result, probabilities.unflatten(0, x.shape[:2]), chosen.unflatten(0, x.shape[:2]))


class Block(nn.Module):
    def __init__(self, args: MoEArgs, layer: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(args.dim, eps=1e-5)
        self.attention = Attention(args)
        self.norm2 = nn.RMSNorm(args.dim, eps=1e-5)
        self.feed_forward = FeedForward(args, layer)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), documents)
        return x + self.feed_forward(self.norm2(x))


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, args: MoEArgs) -> None:
        super().__init__()
        self.token = nn.Embedding(args.vocab_size, args.dim)
        self.position = nn.Embedding(args.max_seq_len, args.dim)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)


class MoEDecoder(nn.Module):
    def __init__(self, args: MoEArgs) -> None:
        super().__init__()
        self.embedding = Embedding(args)
        self.blocks = nn.ModuleList(Block(args, layer) for layer in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.unembedding = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens, positions)
        for block in self.blocks:
            h = block(h, documents)
        return self.unembedding(self.norm(h))
