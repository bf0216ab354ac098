"""Tensor, sequence and loss parallelism by the layout's rules: parameters are sharded inside regions, positions between
regions, and the vocabulary for the loss (Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198; TorchTitan
paper, section 2.2).

Between regions, hidden states are plain tensors with this rank's positions, or all positions without sequence parallelism.
Inside a region (attention, feed-forward) they have all positions and this rank's features.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from titan_core.api import (
    Column,
    Experts,
    ModelPart,
    Problem,
    Row,
    Rule,
    Shard as ShardRule,
    TrainingContext,
    UserError,
    Vocabulary,
    matches,
)
from titan_core.api.model.random_streams import divide_streams
from titan_core.api.training.batch import with_positions
from titan_parallel.config import CompileSection, TensorParallelKeys
from titan_parallel.local_parameters import divide_embedding, divide_parameters, local_shard
from titan_parallel.norms import divide_norm
from titan_parallel.regather import Regather
from titan_parallel.region_collectives import Positions, Ranks, ReplicatedPositions, ShardedPositions, gather_columns
from titan_parallel.slots import PARTIAL_GRADIENTS, REGION_CASTS
from titan_parallel.tensor_parallel_check import DEGREE, divides, undivided_heads
from titan_parallel.torch_private import overlap_tensor_parallel, registered_parameter

log = logging.getLogger(__name__)


def apply(part: ModelPart, context: TrainingContext[TensorParallelKeys]) -> ModelPart:
    """Shard ``part`` over the mesh dimension ``tp``."""
    mesh = context.mesh["tp"]
    keys = context.section
    ranks = Ranks(mesh)
    replicated = keys.disable_sequence_parallel or not context.job.trains
    positions = ReplicatedPositions(ranks) if replicated else ShardedPositions(ranks)
    _require_rules(part)
    _divide_embedding(part, mesh, positions)
    compiled = context.job.section(CompileSection).compiles_blocks
    _divide_ruled(part, mesh, positions, "never" if compiled else keys.tensor_parallel_reshard_after_forward)
    _divide_head(part, mesh, positions, gathers=keys.disable_loss_parallel)
    part.retie()
    divide_streams(part.module, mesh.get_local_rank(), mesh.size())
    if not keys.disable_loss_parallel:
        _require_vocabulary_sharded(part)
        # DTensor gives every rank this many columns, except the last ones, which may have fewer.
        columns = -(-part.layout.vocab_size // mesh.size())
        part.vocabulary = Vocabulary(mesh.get_group(), mesh.get_local_rank() * columns)
    if keys.enable_async_tensor_parallel:
        _enable_async(mesh, context.device)
    # With positions sharded, a model cannot infer them from the length of its hidden states.
    part.batch_transforms += (with_positions,)
    return part


def _divide_embedding(part: ModelPart, mesh: DeviceMesh, positions: Positions) -> None:
    """Divide the first module, which every rank computes in full. The embedding's later modules have rules, as blocks do."""
    for name, whole in part.present(part.layout.embedding[:1]).items():
        for path, module in whole.named_modules(prefix=name):
            if isinstance(module, nn.Embedding) and module.num_embeddings == part.layout.vocab_size:
                between = positions if path == name else ReplicatedPositions(positions.ranks)
                divide_embedding(module, path, mesh, between)
            elif _own(module):
                divide_parameters(module, mesh, dict.fromkeys(_own(module), Replicate()))
        if not isinstance(whole, nn.Embedding) or whole.num_embeddings != part.layout.vocab_size:
            whole.register_forward_hook(lambda module, arguments, output: positions.split(output))


def _divide_ruled(part: ModelPart, mesh: DeviceMesh, positions: Positions, reshard: str) -> None:
    """Divide the modules between the first and the last, by the layout's rules.

    Args:
        reshard: whether regions gather their input again for backward (``tensor_parallel_reshard_after_forward``).
    """
    layout = part.layout
    region: tuple[str, _Region] | None = None
    whole = _whole_regions(part)
    _require_heads(part, whole, mesh.size())
    if whole:
        log.info(
            "tensor parallelism: no rule shards %d region(s), such as %s: each rank computes all of it", len(whole), whole[0]
        )
    for name, module in _ruled_modules(part):
        rules = {leaf: layout.rule(f"{name}.{leaf}") for leaf in _own(module)}
        has_row = isinstance(rules.get("weight"), Row)
        sums = has_row or matches(name, layout.sums)
        if name in whole:
            if positions.differ:
                _gather_input(module, positions, part.entries(REGION_CASTS).get(name), reshard)
                module.register_forward_hook(lambda module, arguments, output: positions.keep(output))
        elif matches(name, layout.regions):
            _gather_input(module, positions, part.entries(REGION_CASTS).get(name), reshard)
            region = name, _Region(positions)
            if not sums:
                module.register_forward_hook(region[1].end)
        late = ["bias"] if has_row and "bias" in rules else []  # added once, after the sum
        if any(isinstance(rule, ShardRule) and rule.norm for rule in rules.values()):
            divide_norm(module, name, positions.ranks)
        if rules:
            placements = {leaf: _placement(rule, leaf) for leaf, rule in rules.items()}
            divide_parameters(module, mesh, placements, hidden=late)
            # Gradients are addends if ranks have different positions or, inside a region, different features.
            divides_features = _is_within(name, layout.regions) and not _is_within(name, whole)
            addends = [leaf for leaf in rules if positions.differ or (leaf not in late and divides_features)]
            replicated = tuple(leaf for leaf in addends if placements[leaf].is_replicate())
            if replicated:
                part.fill(PARTIAL_GRADIENTS.name, name, replicated)
        if sums:
            within = region is not None and name.startswith(f"{region[0]}.")
            _sum_output(module, region[1].sum if region is not None and within else partial(_sum, positions), *late)


class _Region:
    """The sum of a region whose code may compute further, with parameters of its own or with the region's input.

    Without sequence parallelism every rank computes this in full. Its gradients must be addends nevertheless, like all
    others within the region, because they are summed over ranks together. A region that returns its sum needs nothing.
    """

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._sum: tuple[Tensor, Tensor] | None = None  # the last sum of this forward pass, within the region and outside

    def sum(self, addend: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the sum of the ranks' ``addend``, plus ``bias``, for the region's further code."""
        whole = _sum(self._positions, addend, bias)
        within = self._positions.within(whole)
        if not torch.compiler.is_compiling():  # the compiler fuses both factors with the operations around them
            self._sum = within, whole
        return within

    def end(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        """Return the region's ``output``; a forward hook."""
        summed, self._sum = self._sum, None
        if summed is not None and output is summed[0]:
            return summed[1]
        return self._positions.end(output) if isinstance(output, Tensor) else output


def _sum(positions: Positions, addend: Tensor, bias: Tensor | None = None) -> Tensor:
    total = positions.leave(addend)
    return total if bias is None else total + bias.to(total.dtype)


def _own(module: nn.Module) -> list[str]:
    return [leaf for leaf, _ in module.named_parameters(recurse=False)]


def _gather_input(
    module: nn.Module, positions: Positions, cast: Callable[[Tensor], Tensor] | None = None, reshard: str = "never"
) -> None:
    """Gather the first input: one all-gather for all layers that read it, and one reduce-scatter in backward.

    Args:
        cast: applied to each rank's positions before they are gathered.
        reshard: whether to gather it again for backward (``tensor_parallel_reshard_after_forward``).
    """
    regather = Regather(positions.ranks, reshard == "always") if positions.differ and reshard != "never" else None

    def gather(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        first = arguments[0] if cast is None else cast(arguments[0])
        whole = positions.enter(first)
        if regather is not None:
            regather.begin(first, whole)
        return (whole, *arguments[1:])

    module.register_forward_pre_hook(gather)
    if regather is not None:
        module.register_forward_hook(regather.end, always_call=True)


def _sum_output(module: nn.Module, sum_: Callable[[Tensor, Tensor | None], Tensor], bias: str | None = None) -> None:
    """Sum the outputs over ranks.

    Args:
        sum_: (addend, bias) -> their sum.
        bias: the module's parameter to add to the sum, which the module's own code does not add.
    """

    def add(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        return sum_(output, None if bias is None else local_shard(registered_parameter(module, bias)))

    module.register_forward_hook(add)


def _divide_head(part: ModelPart, mesh: DeviceMesh, positions: Positions, gathers: bool) -> None:
    """Shard the layer that computes the logits over its output features, the vocabulary.

    Args:
        gathers: whether it returns all columns, on every rank.
    """
    size = part.layout.vocab_size
    for module in part.present(part.layout.head[-1:]).values():
        divide_parameters(module, mesh, dict.fromkeys(_own(module), Shard(0)))
        _gather_input(module, positions)
        if gathers:
            _gather_output(module, positions.ranks, size)


def _gather_output(module: nn.Module, ranks: Ranks, size: int) -> None:
    """Gather the ``size`` columns of the output. Not by a hook: the core computes the loss around the forward, by chunk."""
    compute = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Tensor:
        return gather_columns(compute(*arguments, **keywords), ranks, size)

    module.forward = forward


def _ruled_modules(part: ModelPart) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules except the first of the embedding and the last of the head, which have plans of their own."""
    ends = (part.layout.embedding[0], part.layout.head[-1])
    for name, module in part.named_modules():
        if not any(name == end or name.startswith(f"{end}.") for end in ends):
            yield name, module


def _placement(rule: Rule | None, leaf: str) -> Placement:
    if isinstance(rule, Experts):
        rule = rule.within
    if isinstance(rule, Column):
        return Shard(0)
    if isinstance(rule, Row):
        return Replicate() if leaf == "bias" else Shard(1)
    return Shard(rule.dim) if isinstance(rule, ShardRule) else Replicate()


def _whole_regions(part: ModelPart) -> list[str]:
    """Return the regions without a sharded parameter. Every rank computes these for all positions, and keeps its own."""
    return [
        name
        for name, module in _ruled_modules(part)
        if matches(name, part.layout.regions)
        and not any(divides(part.layout.rule(path)) for path, _ in module.named_parameters(prefix=name))
    ]


def _require_heads(part: ModelPart, whole: Collection[str], degree: int) -> None:
    """Require that ``degree`` divides the heads of mixers outside of the regions ``whole``.

    Raises:
        UserError: it does not; names the mixer.
    """
    for name, _ in part.named_modules():
        mixer = part.layout.mixer(name)
        why = None if mixer is None else undivided_heads(mixer, degree)
        if why is not None and not _is_within(name, whole):
            raise UserError.one(DEGREE, f"{why} of {name!r}", f"lower it, or set {DEGREE} = 1")


def _is_within(name: str, patterns: Iterable[str]) -> bool:
    paths = itertools.accumulate(name.split("."), lambda path, leaf: f"{path}.{leaf}")
    return any(matches(path, patterns) for path in paths)


def _require_rules(part: ModelPart) -> None:
    """Require a rule for every parameter. One without a rule would learn only from this rank's positions.

    Raises:
        UserError: Some parameters have no rule; names them.
    """
    problems = [
        Problem(
            f"parameter {name + '.' + leaf!r} of the model",
            "has no rule for tensor parallelism",
            "add one to the layout's rules: Column, Row, Shard or Replicate",
        )
        for name, module in _ruled_modules(part)
        for leaf, _ in module.named_parameters(recurse=False)
        if part.layout.rule(f"{name}.{leaf}") is None
    ]
    if problems:
        raise UserError(*problems)


def _require_vocabulary_sharded(part: ModelPart) -> None:
    """Require an objective that accepts logits sharded over the vocabulary.

    Raises:
        UserError: It needs the whole vocabulary.
    """
    if not part.objective.vocabulary_sharded:
        raise UserError.one(
            "objective.name",
            "needs logits of the whole vocabulary, and tensor parallelism shards them",
            "set parallelism.disable_loss_parallel = true, which gathers them",
        )


def _enable_async(mesh: DeviceMesh, device: torch.device) -> None:
    """Overlap the collectives of tensor parallelism with its matmuls.

    Raises:
        UserError: The job does not run on CUDA.
    """
    key = "parallelism.enable_async_tensor_parallel"
    if device.type != "cuda":
        raise UserError.one(key, f"needs symmetric memory on CUDA, and this job runs on {device.type}", f"set {key} = false")
    overlap_tensor_parallel(mesh.get_group())
