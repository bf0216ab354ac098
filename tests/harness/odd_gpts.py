"""Parts and variants of the small GPT that contradict their layout, or would train differently on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.small_gpt import (
    DIM,
    HEAD_DIM,
    HEADS,
    LAYOUT,
    LONGEST,
    VOCAB,
    Attention,
    Block,
    SmallGPT,
    changed,
    with_parts,
)  # fmt: skip
from titan_core.api import CausalAttention, Replicate, Rule, Shard, current_microbatch

# -- other ways through the model


class PositionsApart(SmallGPT):
    """Has separate embeddings of tokens and positions, like GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        del self.embedding
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM)

    def embedded(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        return self.wte(tokens) + self.wpe(where)


APART = replace(LAYOUT, embedding=("wte", "wpe"))


def between(**changes: Callable[[Tensor], Tensor]) -> Callable[[], SmallGPT]:
    """Return a function that builds a model whose forward changes ``embedded`` states or ``logits``."""
    return lambda: SmallGPT(between=changes)


def add_dropout(model: SmallGPT) -> None:
    model.dropout = nn.Dropout(0.5)
    model.between["embedded"] = model.dropout


def without_positions() -> SmallGPT:
    return SmallGPT(reads=lambda positions, documents: (None, documents))


def positions_from_one() -> SmallGPT:
    return SmallGPT(reads=lambda positions, documents: (None if positions is None else (positions + 1) % LONGEST, documents))


def without_documents() -> SmallGPT:
    return SmallGPT(reads=lambda positions, documents: (positions, None))


class SkipConnections(SmallGPT):
    def through_blocks(self, h: Tensor, documents: Tensor | None) -> Tensor:
        return super().through_blocks(h, documents) + h


class Twice(SmallGPT):
    def through_blocks(self, h: Tensor, documents: Tensor | None) -> Tensor:
        return super().through_blocks(super().through_blocks(h, documents), documents)


class LayerDrop(SmallGPT):
    """Skips one block in each training step: the last, the first, and so on. Evaluation alternates as well."""

    def through_blocks(self, h: Tensor, documents: Tensor | None) -> Tensor:
        microbatch = current_microbatch()
        for number, block in enumerate(self.blocks):
            if microbatch is None or number == microbatch.step % len(self.blocks):
                h = block(h, documents)
        return h


class Backwards(SmallGPT):
    """Runs the blocks from the last to the first, and the last one once more."""

    def through_blocks(self, h: Tensor, documents: Tensor | None) -> Tensor:
        for block in (*reversed(self.blocks), self.blocks[-1]):
            h = block(h, documents)
        return h


class UsesTheWeightAlone(SmallGPT):
    def logits(self, h: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(h), self.output.weight)


class ReturnsMore(SmallGPT):
    def logits(self, h: Tensor) -> Any:
        return super().logits(h), torch.zeros(())


def keeps_state() -> SmallGPT:
    """Return a model whose last block adds the output of the first."""
    kept: list[Tensor] = []

    class First(Block):
        def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
            kept[:] = [super().forward(x, documents)]
            return kept[0]

    class Last(Block):
        def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
            return super().forward(x, documents) + (kept.pop() if kept else 0.0)

    return changed(lambda model: setattr(model, "blocks", nn.ModuleList([First(), Last()])))()


# -- a module before a block


class MixedBlock(Block):
    """Adds the output of a module to its input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.extra = module

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(x + self.extra(x), documents)


def mixed(module: Callable[[], nn.Module], block: int = 1) -> Callable[[], SmallGPT]:
    """Return a function that builds a model one of whose blocks is a :class:`MixedBlock`."""
    return changed(lambda model: model.blocks.__setitem__(block, MixedBlock(module())))


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mixed_of(function: Callable[[Tensor], Tensor]) -> Callable[[], SmallGPT]:
    """Return a function that builds a model one of whose blocks adds ``function`` of its input."""
    return mixed(lambda: Of(function))


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


def shifted(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def choosing_tokens(x: Tensor) -> Tensor:
    """Keep a quarter of the tokens of each sequence, as an expert that chooses them does."""
    size = x.norm(dim=-1, keepdim=True)
    return x * (size >= size.topk(x.shape[1] // 4, dim=1).values[:, -1:])


class ShiftedNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + shifted(x))


with_shifted_norm = with_parts({"norms.0": lambda: ShiftedNorm(DIM)}, blocks=(0,))

# -- mixers


class Adding(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = 1 if q.shape[1] in (HEAD_DIM, HEADS) else 2
        k, v = (tensor.repeat_interleave(q.shape[heads] // k.shape[heads], dim=heads) for tensor in (k, v))
        return q + k + v


class CalledBy(nn.Module):
    """A mixer that calls its inner module with keywords or with another layout of the tensors."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, Adding()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.way == "keywords":
            return self.inner(q=q, k=k, v=v)
        return self.inner(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


class SeesTheNext(CausalAttention):
    """A mixer whose keys and values are those of the next token; only within documents if ``of_document``."""

    def __init__(self, of_document: bool = False) -> None:
        super().__init__()
        self.of_document = of_document

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, **keywords: Any) -> Tensor:
        if documents is not None or not self.of_document:
            k, v = k.roll(-1, 2), v.roll(-1, 2)
        return super().forward(q, k, v, documents, **keywords)


# -- parameters in other places


def own_parameter(where: str) -> Callable[[], SmallGPT]:
    """Return a function that builds a model with a parameter on the module ``where``, or with a persistent buffer."""
    if where == "buffer":
        return changed(lambda model: model.register_buffer("steps", torch.zeros(1)))
    return changed(lambda model: model.get_submodule(where).register_parameter("scale", nn.Parameter(torch.ones(DIM))))


own_gain = changed(lambda model: setattr(model.blocks[0].attention, "gain", nn.Parameter(torch.ones(DIM))))
"""Has a parameter directly on the attention module, in none of its layers."""
tied = changed(lambda model: setattr(model.blocks[1].mlp.up, "weight", model.blocks[0].mlp.up.weight))
tied_in_blocks = changed(lambda model: [setattr(block.norms[1], "weight", block.norms[0].weight) for block in model.blocks])
with_wrapped_head = changed(lambda model: setattr(model, "output", nn.Sequential(model.output, nn.Identity())))


class GainedAttention(Attention):
    """Has a parameter on the region itself, and computes queries from a few replicated features."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))
        self.few, self.q = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x * self.gain
        return self.mix(self.q(self.few(x)), self.kv[0](x), self.kv[1](x), documents)


class OwnMLP(nn.Module):
    """Matmuls with its own parameters, without linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(DIM, 2, DIM)), nn.Parameter(torch.ones(2, DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.einsum("bsi,ihf->bshf", x, self.up)
        return torch.einsum("bshf,hfo->bso", nn.functional.silu(features), self.down)


def own_parameters() -> SmallGPT:
    """Return a model with parameters outside linear layers: on blocks, on regions, and on modules within regions."""
    model = with_parts({"attention": GainedAttention, "mlp": OwnMLP})()
    model.blocks[1].register_parameter("gain", nn.Parameter(torch.ones(DIM)))
    model.blocks[1].register_forward_hook(lambda block, _, output: output * block.gain)
    return model


OWN_RULES: dict[str, Rule] = {
    "blocks.*.gain": Replicate(),
    "blocks.*.few.*": Replicate(),
    "blocks.*.mlp.up": Shard(-1),
    "blocks.*.mlp.down": Shard(1),
    **{key: rule for key, rule in LAYOUT.rules.items() if "mlp" not in key},
}
OWN = replace(LAYOUT, rules=OWN_RULES, sums=("blocks.*.mlp",))


class BlockOfAnyDtype(Block):
    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(x.to(self.mlp.up.weight.dtype), documents)


def first_block_in_bfloat16() -> SmallGPT:
    model = SmallGPT()
    model.blocks = nn.ModuleList(BlockOfAnyDtype() for _ in model.blocks)
    model.blocks[0].to(torch.bfloat16)
    return model
