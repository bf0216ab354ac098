"""GPT-2 (Radford et al., 2019), for one device, without dropout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import CausalAttention
from titan_model_gpt2.config import GPT2Args


class Attention(nn.Module):
    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.q, self.k, self.v, self.proj = (nn.Linear(args.dim, args.dim) for _ in range(4))
        self.mixer = CausalAttention()

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.proj(self.mixer(q, k, v, documents).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.up, self.proj = nn.Linear(args.dim, 4 * args.dim), nn.Linear(4 * args.dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(args.dim), Attention(args)
        self.norm2, self.mlp = nn.LayerNorm(args.dim), MLP(args)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), documents)
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.token, self.position = (nn.Embedding(rows, args.dim) for rows in (args.vocab_size, args.max_seq_len))

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        return self.token(tokens) + self.position(positions)


class GPT2(nn.Module):
    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.embedding = Embedding(args)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm, self.unembedding = nn.LayerNorm(args.dim), nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.unembedding.weight = self.embedding.token.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens, positions)
        for block in self.blocks:
            h = block(h, documents)
        return self.unembedding(self.norm(h))
