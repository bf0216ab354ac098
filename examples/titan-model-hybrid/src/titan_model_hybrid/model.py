"""A decoder that alternates between a gated linear recurrence and attention, for one device (after Griffin, De et al., arXiv
2402.19427)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import CausalAttention
from titan_model_hybrid.config import HybridArgs
from titan_model_hybrid.scan import begins, scan


class LinearRecurrence(nn.Module):
    """The mixer: carries a state for each feature from position to position."""

    def forward(self, decay: Tensor, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        """Run the recurrence; the state is reset where a document begins.

        Args:
            decay: ``[batch, seq, features]``, like ``inputs`` and the result.
            documents: ``[batch, seq]``.
        """
        if documents is not None:
            decay = decay.masked_fill(begins(documents)[..., None], 0.0)
        return scan(decay, inputs)[0]


class Gates(nn.Module):
    """Computes how much of its state each feature keeps, and how much of its input it adds. The parameters belong to no
    linear layer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(features))
        self.weight = nn.Parameter(torch.empty(2, features))
        self.bias = nn.Parameter(torch.empty(2, features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``x``, ``[batch, seq, features]``, to decay and inputs of the same shape, in float32."""
        x = x.float()
        keep, take = (torch.sigmoid(x * weight + bias) for weight, bias in zip(self.weight, self.bias, strict=True))
        log_decay = -8.0 * keep * F.softplus(self.rate)
        return log_decay.exp(), torch.sqrt(-torch.expm1(2.0 * log_decay)) * take * x


class Recurrence(nn.Module):
    def __init__(self, args: HybridArgs) -> None:
        super().__init__()
        self.input = nn.Linear(args.dim, args.recurrent_dim, bias=False)
        self.gate = nn.Linear(args.dim, args.recurrent_dim, bias=False)
        self.gates = Gates(args.recurrent_dim)
        self.mixer = LinearRecurrence()
        self.output = nn.Linear(args.recurrent_dim, args.dim, bias=False)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        states = self.mixer(*self.gates(self.input(x)), documents)
        gate = F.gelu(self.gate(x))
        return self.output(gate * states.to(gate.dtype))


class Attention(nn.Module):
    """Attention without position embeddings: the preceding recurrences distinguish positions."""

    def __init__(self, args: HybridArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.q, self.k, self.v, self.output = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))
        self.mixer = CausalAttention()

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (linear(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.output(self.mixer(q, k, v, documents).transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    def __init__(self, args: HybridArgs) -> None:
        super().__init__()
        self.up = nn.Linear(args.dim, 4 * args.dim, bias=False)
        self.down = nn.Linear(4 * args.dim, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, args: HybridArgs, recurrent: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(args.dim)
        self.mixing = Recurrence(args) if recurrent else Attention(args)
        self.norm2 = nn.RMSNorm(args.dim)
        self.mlp = MLP(args)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.mixing(self.norm1(x), documents)
        return x + self.mlp(self.norm2(x))


class Hybrid(nn.Module):
    def __init__(self, args: HybridArgs) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.dim)
        self.blocks = nn.ModuleList(Block(args, args.is_recurrent(index)) for index in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim)
        self.unembedding = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h, documents)
        return self.unembedding(self.norm(h))
