"""A small GPT with dropout at every point where tensor parallelism divides activations differently."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from harness.small_gpt import HEAD_DIM, LAYOUT, MLP, Attention, Block, Embedding, SmallGPT
from titan_core.api import Dropout

BLOCKS = 4
P = 0.1
DROPPING = replace(LAYOUT, num_blocks=BLOCKS)


class DroppingAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.heads, self.after = Dropout(P), Dropout(P), Dropout(P)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.before(x)  # gathered
        batch, seq, _ = x.shape
        q, k, v = (linear(x).view(batch, seq, -1, HEAD_DIM) for linear in (self.q, *self.kv))
        q = self.heads(self.norm(q))  # sharded over features
        mixed = self.mixer(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents)
        return self.after(self.out(mixed.transpose(1, 2).reshape(batch, seq, -1)))  # sharded over positions


class DroppingMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(nn.functional.silu(self.up(x))))


class DroppingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.dropout = DroppingAttention(), DroppingMLP(), Dropout(P)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x), documents)
        return x + self.dropout(self.mlp(self.norms[1](x)))


class DroppingEmbedding(Embedding):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = Dropout(P)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.dropout(super().forward(tokens, positions))


class DroppingGPT(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = DroppingEmbedding()
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(BLOCKS))
