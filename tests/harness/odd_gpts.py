"""Variants of the small GPT that contradict their layout, or that would train differently on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness import small_gpt
from harness.small_gpt import DIM, HEAD_DIM, HEADS, LAYOUT, LONGEST, VOCAB, Attention, Block, SmallGPT
from titan_core.api import CausalAttention, Replicate, Rule, Shard, causal_attention, current_microbatch


class PositionsApart(SmallGPT):
    """Has separate embeddings of tokens and positions, like GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        del self.embedding
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        h = self.wte(tokens) + self.wpe(where)
        for block in self.blocks:
            h = block(h, documents)
        return self.output(self.norm(h))


APART = replace(LAYOUT, embedding=("wte", "wpe"))


class Between(SmallGPT):
    """Changes the hidden states between the modules that the layout names."""

    def __init__(self, **stages: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        def do(name: str, hidden: Tensor) -> Tensor:
            return self.stages.get(name, lambda unchanged: unchanged)(hidden)

        h = do("embedded", self.embedding(tokens, positions))
        for block in self.blocks:
            h = do("block", block(h, documents))
        return do("logits", self.output(self.norm(h)))


class DropoutBetween(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.dropout(self.embedding(tokens, positions))
        for block in self.blocks:
            h = block(h, documents)
        return self.output(self.norm(h))


class SkipConnections(SmallGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = first = self.embedding(tokens, positions)
        for block in self.blocks:
            h = block(h, documents)
        return self.output(self.norm(h + first))


class Twice(SmallGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens, positions)
        for _ in range(2):
            for block in self.blocks:
                h = block(h, documents)
        return self.output(self.norm(h))


class KeptState(SmallGPT):
    """Adds the output of the first block in the last one."""

    def __init__(self) -> None:
        super().__init__()
        kept: list[Tensor] = []

        class First(Block):
            def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
                kept[:] = [super().forward(x, documents)]
                return kept[0]

        class Last(Block):
            def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
                return super().forward(x, documents) + (kept.pop() if kept else 0.0)

        self.blocks = nn.ModuleList([First(), Last()])


class IgnoresPositions(SmallGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return super().forward(tokens, None, documents)


class CountsPositionsFromOne(SmallGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return super().forward(tokens, None if positions is None else (positions + 1) % LONGEST, documents)


class IgnoresDocuments(SmallGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return super().forward(tokens, positions)


class UsesTheWeightAlone(SmallGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens, positions)
        for block in self.blocks:
            h = block(h, documents)
        return nn.functional.linear(self.norm(h), self.output.weight)


class ReturnsMore(SmallGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Any:
        return super().forward(tokens, positions, documents), torch.zeros(())


class Mixed(SmallGPT):
    """One block adds the output of ``module`` to its input."""

    def __init__(self, module: Callable[[], nn.Module], block: int = 1) -> None:
        super().__init__()
        self.blocks[block] = MixedBlock(module())


class MixedBlock(Block):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.extra = module

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(x + self.extra(x), documents)


class Convolution(nn.Module):
    def __init__(self, dilation: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(DIM, DIM, 2, dilation=dilation, groups=DIM)
        self.padding = dilation

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(nn.functional.pad(x.transpose(1, 2), (self.padding, 0))).transpose(1, 2)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def shifted(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class ShiftedNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + shifted(x))


class WithShiftedNorm(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].norms[0] = ShiftedNorm(DIM)  # type: ignore[union-attr, index]


class CalledBy(nn.Module):
    """A mixer that calls its inner module with keywords or with another layout of the tensors."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = Adding()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.way == "keywords":
            return self.inner(q=q, k=k, v=v)
        return self.inner(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


class Adding(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = 1 if q.shape[1] in (HEAD_DIM, small_gpt.HEADS) else 2
        k, v = (tensor.repeat_interleave(q.shape[heads] // k.shape[heads], dim=heads) for tensor in (k, v))
        return q + k + v


class CallsMixers(SmallGPT):
    def __init__(self, way: str) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.mixer = CalledBy(way)


class OwnParameter(SmallGPT):
    """Has a parameter outside all modules of the layout, or a persistent buffer."""

    def __init__(self, where: str) -> None:
        super().__init__()
        if where == "buffer":
            self.register_buffer("steps", torch.zeros(1))
        else:
            owner = self if where == "model" else self.blocks
            owner.scale = nn.Parameter(torch.ones(DIM))


class SeesTheNext(CausalAttention):
    """A mixer whose keys and values are those of the next token; only within documents if ``of_document``."""

    def __init__(self, of_document: bool = False) -> None:
        super().__init__()
        self.of_document = of_document

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, **keywords: Any) -> Tensor:
        if documents is not None or not self.of_document:
            k, v = k.roll(-1, 2), v.roll(-1, 2)
        return super().forward(q, k, v, documents, **keywords)


class WithMixer(SmallGPT):
    def __init__(self, mixer: Callable[[], nn.Module]) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.mixer = mixer()


def choosing_tokens(x: Tensor) -> Tensor:
    """Keep a quarter of the tokens of each sequence, as an expert that chooses them does."""
    size = x.norm(dim=-1, keepdim=True)
    return x * (size >= size.topk(x.shape[1] // 4, dim=1).values[:, -1:])


class Tied(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].mlp.up.weight = self.blocks[0].mlp.up.weight  # type: ignore[union-attr]


class TiedInBlocks(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norms[1].weight = block.norms[0].weight  # type: ignore[index, union-attr]


class WithWrappedHead(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Sequential(self.output, nn.Identity())  # type: ignore[assignment]


class OwnGain(SmallGPT):
    """Has a parameter directly on the attention module, in none of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].attention.gain = nn.Parameter(torch.ones(DIM))  # type: ignore[union-attr]


class FusedAttention(Attention):
    """Computes queries, keys and values with one fused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, 3 * DIM)
        self.kv = nn.ModuleList()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (part.reshape(batch, seq, -1, HEAD_DIM).transpose(1, 2) for part in self.q(x).chunk(3, dim=-1))
        return self.out(self.mixer(self.norm(q), k, v, documents).transpose(1, 2).reshape(batch, seq, -1))


class Fused(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = FusedAttention()


FUSED = replace(
    LAYOUT,
    rules={key: rule for key, rule in LAYOUT.rules.items() if "kv" not in key},
    mixers={"blocks.*.attention.mixer": causal_attention(HEADS)},
)


class GainedAttention(Attention):
    """Has a parameter on the region itself, and computes queries from a few replicated features."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))
        self.few, self.q = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        x = x * self.gain
        full = (self.q(self.few(x)), *(linear(x) for linear in self.kv))
        q, k, v = (tensor.view(batch, seq, -1, HEAD_DIM).transpose(1, 2) for tensor in full)
        return self.out(self.mixer(self.norm(q), k, v, documents).transpose(1, 2).reshape(batch, seq, -1))


class OwnMLP(nn.Module):
    """Matmuls with its own parameters, without linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(DIM, 2, DIM)), nn.Parameter(torch.ones(2, DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.einsum("bsi,ihf->bshf", x, self.up)
        return torch.einsum("bshf,hfo->bso", nn.functional.silu(features), self.down)


class OwnParameters(SmallGPT):
    """Has parameters outside linear layers: on blocks, on regions, and on modules within regions."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention, block.mlp = GainedAttention(), OwnMLP()
        self.blocks[1].register_parameter("gain", nn.Parameter(torch.ones(DIM)))
        self.blocks[1].register_forward_hook(lambda block, _, output: output * block.gain)


OWN_RULES: dict[str, Rule] = {
    "blocks.*.gain": Replicate(),
    "blocks.*.few.*": Replicate(),
    "blocks.*.mlp.up": Shard(-1),
    "blocks.*.mlp.down": Shard(1),
    **{key: rule for key, rule in LAYOUT.rules.items() if "mlp" not in key},
}
OWN = replace(LAYOUT, rules=OWN_RULES, sums=("blocks.*.mlp",))


class LayerDrop(SmallGPT):
    """Skips one block in each training step: the last, the first, and so on. Evaluation alternates as well."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        microbatch = current_microbatch()
        h = self.embedding(tokens, positions)
        for number, block in enumerate(self.blocks):
            if microbatch is None or number == microbatch.step % len(self.blocks):
                h = block(h, documents)
        return self.output(self.norm(h))


class Backwards(SmallGPT):
    """Runs the blocks from the last to the first, and the last one once more."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens, positions)
        for block in (*reversed(self.blocks), self.blocks[-1]):
            h = block(h, documents)
        return self.output(self.norm(h))


class BlockOfAnyDtype(Block):
    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(x.to(self.mlp.up.weight.dtype), documents)


class FirstBlockInBfloat16(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BlockOfAnyDtype() for _ in self.blocks)
        self.blocks[0].to(torch.bfloat16)
