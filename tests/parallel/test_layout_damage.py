# ruff: noqa: E501 - a damage a line reads best
"""A layout that its model contradicts, or a model that a division would train differently, is refused before the first step,
by the name of the field. Each damage here trained wrong, or ended in a traceback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from harness import small_gpt
from harness.jobs import make_job
from harness.small_gpt import DIM, HEAD_DIM, LAYOUT, LONGEST, VOCAB, Block, SmallGPT
from titan_core.errors import UserError
from titan_core.initial_values import Normal
from titan_core.job.job import Job
from titan_core.layout import ModelLayout
from titan_core.model.layout_check import check_layout
from titan_core.model.layout_trial import try_model
from titan_core.model.part import ModelPart, TransformContext
from titan_core.train.loss import cross_entropy_sum
from titan_models_llama.config import FLAVORS
from titan_models_llama.layout import layout as llama_layout
from titan_models_llama.model import Llama
from titan_parallel import tensor_parallel
from titan_parallel.config import TensorParallelKeys
from titan_parallel.fsdp_check import check as fsdp_check

ONE: dict[str, object] = {"training.global_batch_size": 2}
DP: dict[str, object] = {}
TP, PP, CP = ({f"parallelism.{name}_parallel_degree": 2} for name in ("tensor", "pipeline", "context"))
NO_SP = {**TP, "parallelism.disable_sequence_parallel": "true"}
DOCUMENTS = {**ONE, "data.document_mask": "true"}
MESHES: dict[str, dict[str, object]] = {
    "one device": ONE, "FSDP": DP, "TP": TP, "TP without SP": NO_SP, "PP": PP, "CP": CP, "documents": DOCUMENTS,
}  # fmt: skip


def require(job: Job) -> None:
    """What building the job's model checks, without the ranks that it needs."""
    with torch.device("meta"):
        model: Any = job.facts.model.build()
    check_layout(model, job.facts.model.layout, "small")
    try_model(model, job, TransformContext(job.facts, None, torch.device("cpu")))  # type: ignore[arg-type]


def job_on(mesh: dict[str, object], build: Callable[[], object] = SmallGPT, layout: ModelLayout = LAYOUT) -> Job:
    return small_gpt.job_of(small_gpt.definition(build, layout), mesh, 1 if mesh in (ONE, DOCUMENTS) else 2)


# -- models that are damaged


class PositionsApart(SmallGPT):
    """Tokens and positions each have an embedding, as GPT-2's do."""

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
    """Something happens to the hidden states between the modules that the layout names."""

    def __init__(self, **stages: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        def do(name: str, hidden: Tensor) -> Tensor:
            return self.stages.get(name, lambda one: one)(hidden)

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
    """What the first block computes is added in the last one."""

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
    """One block passes its input through ``module`` first."""

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
    """A mixer that is called in another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = LAYOUT_MIXER()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.way == "keywords":
            return self.inner(q=q, k=k, v=v)
        return self.inner(*(one.transpose(1, 2) for one in (q, k, v))).transpose(1, 2)


class LAYOUT_MIXER(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = 1 if q.shape[1] in (HEAD_DIM, small_gpt.HEADS) else 2
        k, v = (one.repeat_interleave(q.shape[heads] // k.shape[heads], dim=heads) for one in (k, v))
        return q + k + v


class CallsMixers(SmallGPT):
    def __init__(self, way: str) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.mixer = CalledBy(way)


class OwnParameter(SmallGPT):
    """Parameters that are in no module of the layout, or a buffer that is saved."""

    def __init__(self, where: str) -> None:
        super().__init__()
        if where == "buffer":
            self.register_buffer("steps", torch.zeros(1))
        else:
            owner = self if where == "model" else self.blocks
            owner.scale = nn.Parameter(torch.ones(DIM))


BUFFER = {"steps": lambda: torch.zeros(1)}


class Tied(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].mlp.up.weight = self.blocks[0].mlp.up.weight  # type: ignore[union-attr]


@dataclass(frozen=True)
class Damage:
    name: str
    mesh: dict[str, object]
    message: str
    build: Callable[[], object] = SmallGPT
    layout: ModelLayout = LAYOUT


INNER_MIXER = replace(LAYOUT, mixers=("blocks.*.attention.mixer.inner",))

DAMAGES = [
    # -- every parameter has one place
    Damage("a head without its norm", ONE, r"'norm\.weight' belongs to none of .* name its module 'norm'", layout=replace(LAYOUT, head=("output",))),
    Damage("half an embedding", ONE, r"'wpe\.weight' belongs to none of embedding", PositionsApart, replace(LAYOUT, embedding=("wte",))),
    Damage("a part of the embedding in the head", ONE, r"head names 'embedding\.token', which is a part of 'embedding' in embedding", layout=replace(LAYOUT, head=("embedding.token", "norm", "output"))),
    Damage("a module twice", ONE, "'norm' stands in embedding, blocks and head more than once", layout=replace(LAYOUT, embedding=("embedding", "norm"))),
    Damage("the model's own parameter", ONE, "'scale' belongs to none of .* move it into a module", lambda: OwnParameter("model")),
    Damage("a parameter beside the blocks", ONE, r"'blocks\.scale' belongs to none of", lambda: OwnParameter("blocks")),
    Damage("a buffer that is saved", ONE, "persistent buffer 'steps' belongs to none of", lambda: OwnParameter("buffer"), replace(LAYOUT, buffers=BUFFER)),
    # -- sizes
    Damage("another vocabulary", ONE, r"logits \[batch, seq, vocab_size\] = \[2, 16, 300\], and returns \[2, 16, 288\]", layout=replace(LAYOUT, vocab_size=300)),
    Damage("another width", ONE, r"hidden states \[batch, seq, dim\] = \[2, 16, 32\], and returns \[2, 16, 24\]; fix dim", layout=replace(LAYOUT, dim=32)),
    Damage("other heads", ONE, "heads is 8 and kv_heads 2, and 'blocks.0.attention.mixer' is called with 4 and 2", layout=replace(LAYOUT, heads=8)),
    Damage("other key heads", ONE, "heads is 4 and kv_heads 4, .* is called with 4 and 2", layout=replace(LAYOUT, kv_heads=4)),
    Damage("a longer context", ONE, "max_seq_len is 65, and position 64 raises IndexError", layout=replace(LAYOUT, max_seq_len=65)),
    # -- calls
    Damage("a module that is not called", ONE, "names 'output', and the model's forward never calls it", UsesTheWeightAlone),
    Damage("more than logits", ONE, r"must return logits .* and returns tuple", ReturnsMore),
    Damage("mixers by keyword", ONE, r"mixers names '.*inner', which is called with keywords alone; call it with \(q, k, v\)", lambda: CallsMixers("keywords"), INNER_MIXER),
    Damage("mixers in another order", ONE, r"mixers names '.*inner', which is called with \[2, 16, 4, 6\]", lambda: CallsMixers("transposed"), INNER_MIXER),
    Damage("documents ignored", DOCUMENTS, "masks_documents is true, and two documents in one sequence do not come out as each does alone", IgnoresDocuments),
    Damage("positions ignored, documents", DOCUMENTS, "two documents in one sequence do not come out as each does alone", IgnoresPositions),
    # -- sequences of a batch
    Damage("a batch norm", DP, r"module 'blocks\.1\.extra\.norm' mixes the sequences of a batch", lambda: Mixed(BatchNorm)),
    # -- pipelines
    Damage("embeddings apart, PP", PP, "between 'wte' and 'wpe', the model's forward changes the hidden states", PositionsApart, APART),
    Damage("a scale between", PP, r"between 'embedding' and 'blocks\.0', the model's forward changes", lambda: Between(embedded=lambda h: h * DIM**0.5)),
    Damage("a dropout between", PP, "the model's forward changes|the forward of the model mixes the sequences", DropoutBetween),
    Damage("logits capped", PP, "behind 'output', the model's forward changes the logits", lambda: Between(logits=torch.tanh)),
    Damage("skip connections", PP, r"between 'blocks\.1' and 'norm', the model's forward changes", SkipConnections),
    Damage("blocks called twice", PP, r"cut into stages, the model computes something else", Twice),
    Damage("state between blocks", PP, "depend on nothing but the hidden states", KeptState),
    Damage("positions counted from one, PP", PP, "take positions from the argument positions", CountsPositionsFromOne),
    # -- context parallelism
    *(
        Damage(f"{name}, CP", CP, rf"{place} depends on other positions and is not in mixers", build)
        for name, place, build in [
            ("a convolution", r"module 'blocks\.1\.extra', before it calls 'blocks\.1\.extra\.convolution'", lambda: Mixed(Convolution)),
            ("a convolution in the first block", r"module 'blocks\.0\.extra', before it calls 'blocks\.0\.extra\.convolution'", lambda: Mixed(Convolution, 0)),
            ("a dilated convolution", r"extra\.convolution'", lambda: Mixed(lambda: Convolution(15))),
            ("a recurrence", r"module 'blocks\.1\.extra\.gru'", lambda: Mixed(Recurrence)),
            ("a running sum", r"module 'blocks\.1\.extra'", lambda: Mixed(lambda: Of(lambda x: x.cumsum(1)))),
            ("a token shift", r"module 'blocks\.1\.extra'", lambda: Mixed(lambda: Of(shifted))),
            ("a look ahead", r"module 'blocks\.1\.extra'", lambda: Mixed(lambda: Of(lambda x: x.roll(-1, 1)))),
            ("a mean", r"module 'blocks\.1\.extra'", lambda: Mixed(lambda: Of(lambda x: x.mean(1, keepdim=True)))),
            ("a norm that shifts", r"module 'blocks\.0\.norms\.0'", WithShiftedNorm),
            ("a shift behind the embedding", "the forward of the model, before it calls 'blocks.0'", lambda: Between(embedded=shifted)),
            ("a shift of the logits", "behind its last module", lambda: Between(logits=shifted)),
            ("positions ignored", "", IgnoresPositions),
        ]
    ),
    Damage("a mixer that is not named", CP, r"mixer' depends on other positions and is not in mixers", layout=replace(LAYOUT, mixers=("blocks.0.attention.mixer",)), build=lambda: Mixed(nn.Identity)),
    # -- tensor parallelism
    Damage("a layer outside of regions", TP, r"column names 'blocks\.0\.mlp\.up', which is in no module of regions", layout=replace(LAYOUT, regions=("blocks.*.attention",))),
    Damage("a region without a row", TP, r"regions names 'blocks\.0\.mlp', in which no layer is in row", layout=replace(LAYOUT, row=("blocks.*.attention.out",))),
    Damage("a region without a column", TP, r"regions names 'blocks\.0\.mlp', in which no layer is in column", layout=replace(LAYOUT, column=LAYOUT.column[:2])),
    Damage("a region within a region", TP, r"regions names 'blocks\.0\.attention', which is a part of the region 'blocks\.0'", layout=replace(LAYOUT, regions=("blocks.[01]", *LAYOUT.regions))),
    Damage("column and row", TP, r"'blocks\.0\.mlp\.up' is in column and in row", layout=replace(LAYOUT, row=("blocks.*.mlp.*", *LAYOUT.row))),
    Damage("a head that ends otherwise", TP, "head ends with 'output', and tensor parallelism divides an nn.Linear", lambda: WithWrappedHead()),
    Damage("embeddings apart, TP", TP, "outside of regions, .* does not take hidden states", PositionsApart, APART),
    Damage("a reversal, TP", TP, r"outside of regions, module 'blocks\.1\.extra'", lambda: Mixed(lambda: Of(lambda x: x.flip(1)))),
    Damage("a norm that shifts, TP", TP, r"module 'blocks\.0\.norms\.0' .* or depends on other positions", WithShiftedNorm),
    Damage("a shift between, TP", TP, "outside of regions, the forward of the model, before it calls 'blocks.0'", lambda: Between(embedded=shifted)),
    Damage("logits normed", TP, "changes the logits that 'output' returns", lambda: Between(logits=lambda x: x.log_softmax(-1))),
    Damage("positions counted from one, TP", NO_SP, "take positions from the argument positions", CountsPositionsFromOne),
]  # fmt: skip


class WithWrappedHead(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Sequential(self.output, nn.Identity())  # type: ignore[assignment]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.name)
def test_damage_is_refused_by_name(damage: Damage) -> None:
    with pytest.raises(UserError, match=damage.message) as caught:
        require(job_on(damage.mesh, damage.build, damage.layout))
    assert all(problem.where == "layout of model 'small'" or "llama3" in problem.where for problem in caught.value.problems)
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_model_without_mistakes_passes(mesh: dict[str, object]) -> None:
    require(job_on(mesh))
    require(job_on(mesh, lambda: SmallGPT(0.3)))


@pytest.mark.parametrize(
    ("mesh", "build", "layout"),
    [
        (DP, PositionsApart, APART),
        (DP, lambda: Mixed(Convolution), LAYOUT),
        (PP, lambda: Mixed(Convolution), LAYOUT),
        (DP, SkipConnections, LAYOUT),
        (TP, lambda: Between(embedded=lambda h: h * 3.0), LAYOUT),
        (CP, lambda: Between(embedded=lambda h: h * 3.0, logits=torch.tanh), LAYOUT),
        ({**TP, "parallelism.disable_loss_parallel": "true"}, lambda: Between(logits=lambda x: x.log_softmax(-1)), LAYOUT),
        (NO_SP, WithShiftedNorm, LAYOUT),
        (ONE, lambda: Mixed(BatchNorm), LAYOUT),
    ],
)  # fmt: skip
def test_what_a_division_can_do_is_not_refused(
    mesh: dict[str, object], build: Callable[[], object], layout: ModelLayout
) -> None:
    require(job_on(mesh, build, replace(layout, parameters={"*": Normal(0.02)})))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("tied", [False, True])
def test_llama_passes(mesh: dict[str, object], tied: bool) -> None:
    if mesh is PP and tied:
        pytest.skip("pipelines refuse shared parameters when the job is assembled")
    overrides = {**mesh, "model.args.tie_embeddings": str(tied).lower(), "training.local_batch_size": 2}
    require(make_job("llama3_debug", overrides, 1 if mesh in (ONE, DOCUMENTS) else 2))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_the_example_of_a_model_passes(mesh: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / "examples" / "titan-model-tinygpt" / "src"
    monkeypatch.syspath_prepend(str(example))
    from titan_model_tinygpt.config import TinyGPTArgs  # type: ignore[import-not-found]
    from titan_model_tinygpt.layout import define  # type: ignore[import-not-found]

    require(small_gpt.job_of(define(TinyGPTArgs()), mesh, 1 if mesh in (ONE, DOCUMENTS) else 2))


def test_parameters_that_fsdp_gathers_apart_are_not_shared() -> None:
    layout = replace(LAYOUT, tied={"blocks.1.mlp.up.weight": "blocks.0.mlp.up.weight"})
    facts = job_on(DP, Tied, layout).facts
    (problem,) = fsdp_check(facts)
    assert "ties 'blocks.1.mlp.up.weight' to 'blocks.0.mlp.up.weight', and FSDP gathers the two apart" in str(problem)
    for pair in ("output.weight", "embedding.token.weight"), ("blocks.0.mlp.up.weight", "blocks.0.attention.q.weight"):
        shared = replace(LAYOUT, tied=dict([pair]))
        assert not list(fsdp_check(job_on(DP, SmallGPT, shared).facts))


WIDE = FLAVORS["405B"].model_copy(update={"n_layers": 3})


class ShiftedLlama(Llama):
    """Hidden states of the last block's input lean on the position before."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        last = self.layers[str(len(self.layers) - 1)]
        last.ffn_norm = Of(shifted)  # type: ignore[assignment]


class Largest(TorchDispatchMode):
    """The largest tensor outside of the meta device, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.device.type != "meta":
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return result


def test_a_large_model_is_tried_in_little_memory() -> None:
    """One layer that mixes positions is found, and no weight of gigabytes is made for it."""
    layout = llama_layout(WIDE)
    with Largest() as largest:
        require(small_gpt.job_of(small_gpt.definition(lambda: Llama(WIDE), layout), CP, 2))
    patterns = tuple(one for one in layout.per_position if "ffn_norm" not in one)
    damaged = replace(layout, per_position=patterns)
    with largest, pytest.raises(UserError, match=r"module 'layers\.2\.ffn_norm' depends on other positions"):
        require(small_gpt.job_of(small_gpt.definition(ShiftedLlama, damaged), CP, 2))
    assert largest.bytes < 64 << 20


class OwnGain(SmallGPT):
    """Attention has a parameter that is in no layer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].attention.gain = nn.Parameter(torch.ones(DIM))  # type: ignore[union-attr]


def test_parameters_of_a_region_itself_cannot_be_divided() -> None:
    def plan_of(model: nn.Module) -> None:
        part, hidden = ModelPart(model, LAYOUT, cross_entropy_sum), Shard(1)
        plan = tensor_parallel._embedding_plan(part, hidden) | tensor_parallel._block_plan(part, hidden)
        tensor_parallel._require_whole(part, plan | tensor_parallel._head_plan(part, hidden, TensorParallelKeys()))

    plan_of(SmallGPT())
    with pytest.raises(UserError, match=r"^module 'blocks\.0\.attention' of the model: it has parameters, and the layout"):
        plan_of(OwnGain())
