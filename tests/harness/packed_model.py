"""The model of :mod:`harness.packed`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.packed import HEADS, LAYERS, VOCABULARY, PackedArgs, from_args
from titan_core.api import CausalAttention


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in "qkvo")
        self.mixer = CausalAttention()
        self.width = dim // HEADS

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        q, k, v = (one(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.o(self.mixer(q, k, v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Every token passes through all experts, whose outputs are added by constant shares."""

    correction: Tensor

    def __init__(self, args: PackedArgs) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(args.num_experts, 2 * args.ffn_dim, args.dim))
        self.down = nn.Parameter(torch.empty(args.num_experts, args.dim, args.ffn_dim))
        self.register_buffer("correction", torch.empty(args.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        gate, up = torch.einsum("bsd,efd->besf", x, self.gate_up).chunk(2, -1)
        shares = self.correction.softmax(0)
        return torch.einsum("besf,edf,e->bsd", torch.sigmoid(gate) * up, self.down, shares)


class Block(nn.Module):
    def __init__(self, args: PackedArgs) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.experts = nn.RMSNorm(args.dim), Attention(args.dim), Experts(args)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.experts(x)


class PackedModel(nn.Module):
    """Maps token ids to logits."""

    def __init__(self, args: PackedArgs) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, args.dim)
        self.blocks = nn.ModuleList(Block(args) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """``tokens`` is ``[batch, seq]``; logits are ``[batch, seq, vocab]``."""
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.output(self.norm(h))


def write_packed(folder: Path, args: PackedArgs) -> dict[str, Tensor]:
    """Write a folder with random weights as the other format packs them; return them."""
    generator = torch.Generator().manual_seed(0)
    dim, ffn, experts = args.dim, args.ffn_dim, range(args.num_experts)
    shapes = {"wte.weight": (VOCABULARY, dim), "lm_head.weight": (VOCABULARY, dim), "ln_f.weight": (dim,)}
    for layer in range(LAYERS):
        shapes |= {f"h.{layer}.qkv.weight": (dim, 3 * dim), f"h.{layer}.proj.weight": (dim, dim)}
        shapes |= {f"h.{layer}.ln.weight": (dim,), f"h.{layer}.score_correction": (len(experts),)}
        shapes |= {f"h.{layer}.experts.{one}.{name}": (ffn, dim) for one in experts for name in ("gate", "up")}
        shapes |= {f"h.{layer}.experts.{one}.down": (ffn, dim) for one in experts}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(from_args(args)))
    return tensors
