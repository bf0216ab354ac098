# ruff: noqa: E501 - one plant per line reads best
"""Divisions whose loss is right and whose gradients are wrong, as mistakes of a layout, a model or a plugin make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.odd_gpts import OWN, between, own_parameters
from harness.own_mixers import twice, with_mean, with_means
from harness.small_gpt import DIM, LAYOUT, MLP, Attention, SmallGPT, changed, with_parts
from harness.unusual_gpts import FUSED, fused
from titan_core.api import Column, ModelLayout, Replicate, Row, Shard
from titan_core.api.model.layout_rules import Rule

TP, PP, CP, REPLICATE = (
    {f"parallelism.{name}_degree": 2}
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
)
FSDP: dict[str, object] = {"parallelism.data_parallel_shard_degree": 2}
NO_SP: dict[str, object] = {**TP, "parallelism.disable_sequence_parallel": "true"}
TWO_MICROBATCHES: dict[str, object] = {"training.local_batch_size": 1, "training.global_batch_size": 4}


@dataclass(frozen=True)
class Plant:
    """A mistake, and what its refusal must contain."""

    name: str
    mesh: dict[str, object]
    says: str
    build: Callable[[], object] = SmallGPT
    layout: ModelLayout = LAYOUT
    patch: Callable[[pytest.MonkeyPatch], None] = field(default=lambda patch: None)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant it in this process."""
        with pytest.MonkeyPatch.context() as patch:
            self.patch(patch)
            yield


# -- models


class GainAfterSum(MLP):
    """A region that multiplies its sum by a replicated parameter, and adds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + 0.5 * x


class SumInTheMiddle(nn.Module):
    """A region that computes with all features of a sum, in a layer that is divided again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.again, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.silu(self.again(self.down(nn.functional.silu(self.up(x))))))


def in_each_block(module: Callable[[], nn.Module]) -> Callable[[], SmallGPT]:
    """Return a function that builds a model whose blocks add a module's output, outside all regions."""

    def add_to(model: SmallGPT) -> None:
        for block in model.blocks:
            block.extra = module()
            block.register_forward_hook(lambda block, arguments, output: output + block.extra(output))

    return changed(add_to)


def with_mlp(mlp: Callable[[], nn.Module]) -> Callable[[], SmallGPT]:
    return with_parts({"mlp": mlp})


class Gained(nn.Module):
    """Multiplies by a gain, whose gradient depends on how many positions or features are here."""

    def __init__(self, wrong: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gain, self.wrong = nn.Parameter(torch.ones(DIM)), wrong

    def forward(self, x: Tensor) -> Tensor:
        return self.wrong(x, self.gain)


class _OfPositions(torch.autograd.Function):
    """Multiplies, and takes the mean over positions where the gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return gradient * gain, (gradient * x).sum((0, 1)) / x.shape[1]


def mean_over_positions(x: Tensor, gain: Tensor) -> Tensor:
    return _OfPositions.apply(x, gain)  # type: ignore[no-any-return]


def detached_in_parts(x: Tensor, gain: Tensor) -> Tensor:
    """Train the gain only where whole sequences are present."""
    return x * (gain if x.shape[1] >= 16 else gain.detach())


class Leaking(nn.Module):
    """Keeps a running mean in a buffer, and subtracts it: each microbatch sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result = torch.tanh(x - self.mean)
        with torch.no_grad():
            self.mean += x.mean((0, 1))
        return result


class StaleNorm(nn.Module):
    """Divides by a scale that the first call has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None or self.scale.device != x.device:
            self.scale = x.detach().square().mean().rsqrt()
        return x * self.scale * self.weight


class SetWhileForward(SmallGPT):
    """Sets a factor of its blocks in forward and resets it at the end, which recomputation finds."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = Factor()

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        Factor.factor = 3.0
        logits = super().forward(tokens, positions, documents)
        Factor.factor = 1.0
        return logits


class Factor(MLP):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x * self.factor))


class ScaledByShard(MLP):
    """Scales the gradient by the number of features that this rank has."""

    def forward(self, x: Tensor) -> Tensor:
        features = nn.functional.silu(self.up(x))
        share = features.shape[-1] / (2 * DIM)
        return self.down(features.detach() + share * (features - features.detach()))


class HalfDetached(Attention):
    """Detaches the keys of the heads that another rank would have."""

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        keys = self.kv[0]
        whole = keys(x).shape[-1] == keys.out_features and self.q(x).shape[-1] == DIM
        return super().forward(x if whole else x.detach() + 0.0 * x, documents)


scaled_by_batch = between(embedded=lambda h: h.detach() + (h - h.detach()) / len(h))
"""Divides a gradient by the number of sequences of the microbatch."""


OTHER: dict[Rule, Rule] = {Column(): Row(), Row(): Column()}
SWAPPED_ROW = r"rules have Row\(\) for 'blocks.0.attention.q.weight', but its layer takes the whole input of region"
SWAPPED = replace(LAYOUT, rules={path: OTHER.get(rule, rule) for path, rule in LAYOUT.rules.items()})
EXTRA = replace(LAYOUT, rules={"blocks.*.extra.*": Replicate(), **LAYOUT.rules})
LEAKING = replace(LAYOUT, buffers={"*.mean": lambda: torch.zeros(DIM)})
AFTER = replace(LAYOUT, rules={"blocks.*.mlp.gain": Replicate(), **LAYOUT.rules})
MIDDLE = replace(
    LAYOUT,
    rules={"blocks.*.mlp.again.*": Column(), "blocks.*.mlp.out.*": Row(), **LAYOUT.rules},
)


# -- mistakes of transforms


def unsummed(patch: pytest.MonkeyPatch) -> None:
    from titan_parallel.partial_gradients import PartialGradients

    patch.setattr(PartialGradients, "_sum", lambda self, gradients: None)


def summed_twice(patch: pytest.MonkeyPatch) -> None:
    from titan_parallel.partial_gradients import PartialGradients

    once = PartialGradients._sum

    def twice_(self: PartialGradients, gradients: list[Tensor]) -> None:
        once(self, gradients)
        once(self, gradients)

    patch.setattr(PartialGradients, "_sum", twice_)


def all_replicated_are_addends(patch: pytest.MonkeyPatch) -> None:
    """The norms between regions are summed, although every rank has all positions."""
    from titan_parallel.region_collectives import ReplicatedPositions

    patch.setattr(ReplicatedPositions, "differ", True)


def regions_do_not_end(patch: pytest.MonkeyPatch) -> None:
    from titan_parallel.region_collectives import ReplicatedPositions

    patch.setattr(ReplicatedPositions, "end", lambda self, result: result)


def gathered_without_reduction(patch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from titan_parallel import region_collectives

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(ctx.size, 1)[dist.get_rank() % ctx.size], None, None

    patch.setattr(region_collectives._Gather, "backward", staticmethod(backward))


def input_not_reduced(patch: pytest.MonkeyPatch) -> None:
    from titan_parallel import region_collectives

    patch.setattr(region_collectives._Copy, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def sum_reduced_again(patch: pytest.MonkeyPatch) -> None:
    from titan_parallel import region_collectives

    patch.setattr(region_collectives._Sum, "backward", staticmethod(lambda ctx, gradient: (2.0 * gradient, None)))


def averaged(patch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    def set_factor(self: FSDPModule, factor: float) -> None:
        original(self, 2.0)

    original = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", set_factor)


def not_replicated(patch: pytest.MonkeyPatch) -> None:
    """Data parallelism forgets to sum over replicas."""
    from titan_core.api import JobMesh

    whole = JobMesh.data_mesh
    patch.setattr(JobMesh, "data_mesh", lambda self, view=None: self["dp_shard"] if whole(self, view).ndim == 2 else None)


def stages_double(patch: pytest.MonkeyPatch) -> None:
    from titan_core.api.parallel.model_part import PrunedModule

    patch.setattr(PrunedModule, "forward", lambda self, hidden, *arguments, **keywords: twice(hidden))


def ring_keeps_gradients(patch: pytest.MonkeyPatch) -> None:
    from titan_parallel import context_parallel

    ring = context_parallel.ring_attention
    patch.setattr(
        context_parallel, "ring_attention", lambda q, k, v, *rest: ring(q, k.detach() + 0.5 * (k - k.detach()), v, *rest)
    )


def logits_of_other_columns(patch: pytest.MonkeyPatch) -> None:
    """The gradient of logits that are gathered is summed over ranks, which have all computed the same."""
    from titan_parallel import tensor_parallel

    gather = tensor_parallel.gather_columns
    patch.setattr(tensor_parallel, "gather_columns", lambda columns, ranks, size: twice(gather(columns, ranks, size)))


GATHERED = {**TP, "parallelism.disable_loss_parallel": "true"}
RECOMPUTED = {**FSDP, "activation_checkpoint.mode": "full"}

PLANTS = [
    # -- tensor parallelism
    Plant("a sum that is not taken", TP, r"'norm.weight' receives .* on one device", patch=unsummed),
    Plant("a sum taken twice", TP, r"'norm.weight' receives 2 times", patch=summed_twice),
    Plant("a sum of what is whole", NO_SP, r"'norm.weight' receives 2 times", patch=all_replicated_are_addends),
    Plant("a gain after the sum", NO_SP, r"'blocks.\d.mlp.gain' receives 2 times", with_mlp(GainAfterSum), AFTER, regions_do_not_end),
    Plant("a sum in the middle", NO_SP, r"'blocks.\d.mlp.down.bias' receives another gradient", with_mlp(SumInTheMiddle), MIDDLE),
    Plant("an input that is not reduced", TP, r"parameter '.*' receives another gradient", patch=gathered_without_reduction),
    Plant("an input that is not reduced, all positions", NO_SP, r"parameter '.*' receives another gradient", patch=input_not_reduced),
    Plant("a sum that is reduced again", NO_SP, r"'blocks.\d.mlp.up.bias' receives 2 times", patch=sum_reduced_again),
    Plant("a gain of the wrong scale", TP, r"'blocks.\d.extra.gain' receives 2 times", in_each_block(lambda: Gained(mean_over_positions)), EXTRA),
    Plant("a gain that is detached in parts", TP, r"'blocks.\d.extra.gain' receives no gradient", in_each_block(lambda: Gained(detached_in_parts)), EXTRA),
    Plant("features of the wrong scale", NO_SP, r"'blocks.\d.mlp.up.bias' receives 0.5 times", with_mlp(ScaledByShard)),
    Plant("a detached branch", TP, r"'blocks.\d.norms.0.bias' receives no gradient", with_parts({"attention": HalfDetached})),
    Plant("logits gathered twice", GATHERED, r"'output.weight' receives 2 times", patch=logits_of_other_columns),
    # -- rules that do not fit what a region computes
    Plant("Column and Row swapped", TP, SWAPPED_ROW, layout=SWAPPED),
    Plant("Column and Row swapped, all positions", NO_SP, SWAPPED_ROW, layout=SWAPPED),
    Plant("queries, keys and values in one layer", TP, r"module 'blocks.0.attention', before it calls 'blocks.0.attention.norm', computes another result.*receives", fused, FUSED),
    Plant("a dimension that is not divided", TP, r"cannot compute with a rank.s share", own_parameters, replace(OWN, rules={**OWN.rules, "blocks.*.mlp.down": Shard(2)})),
    Plant("a whole parameter of divided features", TP, r"cannot compute with a rank.s share", own_parameters, replace(OWN, rules={**OWN.rules, "blocks.*.mlp.down": Replicate()})),
    Plant("sums of what is whole", NO_SP, r"module 'blocks.0.attention' computes another result", own_parameters, replace(OWN, sums=("blocks.*.mlp", "blocks.*.attention"))),
    # -- context parallelism
    Plant("a mixer that keeps its addend", CP, r"backward pass of module 'blocks.0.mean' .*'embedding.token.weight' receives another gradient", with_mean, with_means("own_addend")),
    Plant("a mixer that doubles", CP, r"backward pass of module 'blocks.0.mean' .*'embedding.token.weight' receives another gradient", with_mean, with_means("doubled")),
    Plant("a mixer that detaches", CP, r"backward pass of module 'blocks.0.mean' .*'embedding.token.weight' receives another gradient", with_mean, with_means("others_detached")),
    Plant("a mixer whose gain learns half", CP, r"'blocks.\d.mean.gain' receives another gradient", with_mean, with_means("gain_of_one_chunk")),
    Plant("a mixer that is stale", {**CP, **TWO_MICROBATCHES}, r"module 'blocks.0.mean' computes another result", with_mean, with_means("stale")),
    Plant("a ring that loses keys", CP, r"'blocks.\d.attention.kv.0.weight' receives 0.5 times", patch=ring_keeps_gradients),
    # -- data parallelism, recomputation, pipelines
    Plant("gradients averaged", FSDP, r"'output.weight' receives 0.5 times", patch=averaged),
    Plant("replicas that are not summed", REPLICATE, r"'output.weight' receives another gradient", patch=not_replicated),
    Plant("a buffer that leaks", {**FSDP, **TWO_MICROBATCHES}, r"module 'blocks.0.extra' computes another result", in_each_block(Leaking), LEAKING),
    Plant("a stale norm", {**FSDP, **TWO_MICROBATCHES}, r"module 'blocks.0.extra' computes another result", in_each_block(StaleNorm), EXTRA),
    Plant("a gradient per sequence", {**FSDP, "training.local_batch_size": 2}, r"'embedding.\w+.weight' receives 2 times", scaled_by_batch),
    Plant("recomputation that differs", RECOMPUTED, r"parameter 'blocks.\d.mlp.up.weight' receives", SetWhileForward),
    Plant("a stage that doubles", PP, r"parameter '.*' receives \d+ times", patch=stages_double),
]  # fmt: skip
