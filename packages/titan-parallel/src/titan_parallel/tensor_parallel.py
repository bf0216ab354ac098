"""Tensor, sequence and loss parallelism by the layout's rules: parameters are sharded inside regions, positions between
regions, and the vocabulary for the loss (Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198; TorchTitan
paper, section 2.2).

Between regions, hidden states are plain tensors with this rank's positions, or all positions without sequence parallelism.
Inside a region (attention, feed-forward) they have all positions and this rank's features.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from titan_core.api.batch import with_positions
from titan_core.api.build_context import TrainingContext
from titan_core.api.errors import Problem, UserError
from titan_core.api.layout import ModelLayout
from titan_core.api.layout_rules import Column, Experts, Row, Rule
from titan_core.api.layout_rules import Shard as ShardRule
from titan_core.api.model_part import ModelPart, Slot
from titan_core.api.random_streams import divide_streams
from titan_core.api.tools.patterns import matches
from titan_core.api.vocabulary import Vocabulary
from titan_parallel.config import TensorParallelKeys
from titan_parallel.local_parameters import LocalParameters, SumOutput
from titan_parallel.styles import DivideColumns, DivideVocabulary, GatherInput, SplitOutput, WaitForOutput
from titan_parallel.torch_private import overlap_tensor_parallel

REGION_CASTS: Slot[Callable[[Tensor], Tensor]] = Slot("titan_parallel.region_casts")
"""Region name -> cast of the input that its layers share, applied to each rank's positions before the all-gather."""


def apply(part: ModelPart, context: TrainingContext[TensorParallelKeys]) -> ModelPart:
    """Shard ``part`` over the mesh dimension ``tp``."""
    mesh = context.mesh["tp"]
    keys = context.section
    hidden: Placement = Replicate() if keys.disable_sequence_parallel or not context.facts.trains else Shard(1)
    _require_rules(part)
    plan = _embedding_plan(part, hidden) | _block_plan(part, hidden) | _head_plan(part, hidden, keys)
    for name, styles in plan.items():
        for style in styles:
            parallelize_module(part.module.get_submodule(name), mesh, style)
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


Plan = dict[str, list[ParallelStyle]]
"""Module name -> styles, applied in order."""


def _embedding_plan(part: ModelPart, hidden: Placement) -> Plan:
    """Plan the first module, which every rank computes in full. Later modules of the embedding are ruled, as blocks are."""
    plan: Plan = {}
    for name, whole in part.present(part.layout.embedding[:1]).items():
        for path, module in whole.named_modules(prefix=name):
            if isinstance(module, nn.Embedding) and module.num_embeddings == part.layout.vocab_size:
                output = hidden if path == name else Replicate()
                # A compiled block whose input is still in flight loses that input's gradient (torch 2.15).
                plan[path] = [RowwiseParallel(input_layouts=Replicate(), output_layouts=output), WaitForOutput()]
            elif any(True for _ in module.parameters(recurse=False)):
                names = [leaf for leaf, _ in module.named_parameters(recurse=False)]
                plan[path] = [LocalParameters(dict.fromkeys(names, Replicate()), gradient=Replicate())]
        if name not in plan or not isinstance(whole, nn.Embedding):
            plan.setdefault(name, []).append(SplitOutput(hidden))
    return plan


def _block_plan(part: ModelPart, hidden: Placement) -> Plan:
    """Plan the modules between the first and the last, by the layout's rules."""
    layout = part.layout
    plan: Plan = {}
    for name, module in _ruled_modules(part):
        styles: list[ParallelStyle] = []
        if matches(name, layout.regions):
            styles.append(GatherInput(hidden, part.entries(REGION_CASTS).get(name)))
        rules = {leaf: layout.rule(f"{name}.{leaf}") for leaf, _ in module.named_parameters(recurse=False)}
        if isinstance(rules.get("weight"), Column):
            styles.append(DivideColumns())
        elif isinstance(rules.get("weight"), Row):
            styles.append(RowwiseParallel(output_layouts=hidden))
        elif rules:
            # Gradients are partial if ranks have different positions or, inside a region, different features.
            same = hidden.is_replicate() and not _is_in_region(name, layout)
            placements = {leaf: _placement(rule) for leaf, rule in rules.items()}
            styles.append(LocalParameters(placements, Replicate() if same else Partial()))
        if matches(name, layout.sums):
            styles.append(SumOutput(hidden))
        if styles:
            plan[name] = styles
    return plan


def _ruled_modules(part: ModelPart) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules except the first of the embedding and the last of the head, which have plans of their own."""
    ends = (part.layout.embedding[0], part.layout.head[-1])
    for name, module in part.named_modules():
        if not any(name == end or name.startswith(f"{end}.") for end in ends):
            yield name, module


def _placement(rule: Rule | None) -> Placement:
    if isinstance(rule, Experts):
        rule = rule.within
    return Shard(rule.dim) if isinstance(rule, ShardRule) else Replicate()


def _is_in_region(name: str, layout: ModelLayout) -> bool:
    paths = itertools.accumulate(name.split("."), lambda path, leaf: f"{path}.{leaf}")
    return any(matches(path, layout.regions) for path in paths)


def _head_plan(part: ModelPart, hidden: Placement, keys: TensorParallelKeys) -> Plan:
    output = Replicate() if keys.disable_loss_parallel else Shard(-1)
    logits = part.present(part.layout.head[-1:])
    return {name: [DivideVocabulary(hidden, output)] for name in logits}


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
