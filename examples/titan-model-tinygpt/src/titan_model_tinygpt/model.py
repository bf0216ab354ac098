"""A small GPT, for one device."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import CausalAttention, Dropout
from titan_model_tinygpt.config import TinyGPTArgs


class Attention(nn.Module):
    def __init__(self, args: TinyGPTArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.q = nn.Linear(args.dim, args.dim)
        self.k = nn.Linear(args.dim, args.dim)
        self.v = nn.Linear(args.dim, args.dim)
        self.proj = nn.Linear(args.dim, args.dim)
        self.mixer = CausalAttention()
        self.dropout = Dropout(args.dropout)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (linear(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.dropout(self.proj(self.mixer(q, k, v, documents).transpose(1, 2).reshape(batch, seq, -1)))


class MLP(nn.Module):
    def __init__(self, args: TinyGPTArgs) -> None:
        super().__init__()
        self.up = nn.Linear(args.dim, 4 * args.dim)
        self.down = nn.Linear(4 * args.dim, args.dim)
        self.dropout = Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, args: TinyGPTArgs) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.norm2 = nn.LayerNorm(args.dim)
        self.mlp = MLP(args)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), documents)
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, args: TinyGPTArgs) -> None:
        super().__init__()
        self.token = nn.Embedding(args.vocab_size, args.dim)
        self.position = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout = Dropout(args.dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class TinyGPT(nn.Module):
    def __init__(self, args: TinyGPTArgs) -> None:
        super().__init__()
        self.embedding = Embedding(args)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.unembedding = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens, positions)
        for block in self.blocks:
            h = block(h, documents)
        return self.unembedding(self.norm(h))
