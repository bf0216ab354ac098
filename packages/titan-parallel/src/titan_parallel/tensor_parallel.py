"""Tensor parallelism, by layout: linear layers divided by columns and rows, positions divided between them, the loss
computed on a divided vocabulary (Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198; TorchTitan paper,
section 2.2).

Between modules, hidden states are plain tensors: with sequence parallelism this rank's share of the positions, without it
all of them. Inside a region (attention, feed-forward) all positions are there, and this rank's share of the features.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)  # fmt: skip

from titan_core.api.batch import with_positions
from titan_core.api.errors import Problem, UserError
from titan_core.api.layout import ModelLayout
from titan_core.api.model_part import ModelPart, TransformContext
from titan_core.api.random_streams import divide_streams
from titan_core.api.tools.patterns import matches
from titan_core.api.vocabulary import Vocabulary
from titan_parallel.config import TensorParallelKeys
from titan_parallel.styles import DivideVocabulary, GatherInput, ReplicateWeights, SplitOutput, WaitForOutput


def apply(part: ModelPart, context: TransformContext) -> ModelPart:
    """Divide ``part`` over the mesh dimension ``tp``."""
    mesh = context.mesh["tp"]
    keys = context.facts.section(TensorParallelKeys)
    hidden: Placement = Replicate() if keys.disable_sequence_parallel else Shard(1)
    plan = _embedding_plan(part, hidden) | _block_plan(part, hidden) | _head_plan(part, hidden, keys)
    _require_whole(part, plan)
    for name, styles in plan.items():
        for style in styles:
            parallelize_module(part.module.get_submodule(name), mesh, style)
    part.retie()
    divide_streams(part.module, mesh.get_local_rank(), mesh.size())
    if not keys.disable_loss_parallel:
        _require_vocabulary_sharded(part)
        # As DTensor divides: all ranks but the last ones have as many columns.
        columns = -(-part.layout.vocab_size // mesh.size())
        part.vocabulary = Vocabulary(mesh.get_group(), mesh.get_local_rank() * columns)
    if keys.enable_async_tensor_parallel:
        _enable_async(mesh, context.device)
    # A module inside of a region cannot infer positions from the length of its neighbours' hidden states.
    part.batch_transforms += (with_positions,)
    return part


Plan = dict[str, list[ParallelStyle]]
"""Module name -> styles, applied in order."""


def _embedding_plan(part: ModelPart, hidden: Placement) -> Plan:
    """The first module is computed whole on each rank; those behind it get hidden states, as those in blocks do."""
    plan: Plan = {}
    for name, whole in part.present(part.layout.embedding[:1]).items():
        for path, module in whole.named_modules(prefix=name):
            if isinstance(module, nn.Embedding) and module.num_embeddings == part.layout.vocab_size:
                output = hidden if path == name else Replicate()
                # A compiled block that is given a tensor still in flight loses its gradient (torch 2.15).
                plan[path] = [RowwiseParallel(input_layouts=Replicate(), output_layouts=output), WaitForOutput()]
            elif any(True for _ in module.parameters(recurse=False)):
                plan[path] = [ReplicateWeights()]
        if name not in plan or not isinstance(whole, nn.Embedding):
            plan.setdefault(name, []).append(SplitOutput(hidden))
    return plan


def _block_plan(part: ModelPart, hidden: Placement) -> Plan:
    layout = part.layout
    plan: Plan = {}
    for name, _ in part.named_modules():
        if matches(name, layout.regions):
            plan[name] = [GatherInput(hidden, part.casts.get(name))]
        elif matches(name, layout.column):
            plan[name] = [ColwiseParallel(input_layouts=Replicate())]
        elif matches(name, layout.row):
            plan[name] = [RowwiseParallel(output_layouts=hidden)]
        elif matches(name, layout.per_position):
            # Within a region each rank has other features, so there too gradients are sums over what ranks have.
            whole = hidden.is_replicate() and not _is_in_region(name, layout)
            plan[name] = [ReplicateWeights() if whole else SequenceParallel(use_local_output=True)]
    return plan


def _is_in_region(name: str, layout: ModelLayout) -> bool:
    parents = itertools.accumulate(name.split(".")[:-1], lambda path, leaf: f"{path}.{leaf}")
    return any(matches(parent, layout.regions) for parent in parents)


def _head_plan(part: ModelPart, hidden: Placement, keys: TensorParallelKeys) -> Plan:
    output = Replicate() if keys.disable_loss_parallel else Shard(-1)
    logits = part.present(part.layout.head[-1:])
    return {name: [DivideVocabulary(hidden, output)] for name in logits}


def _require_whole(part: ModelPart, plan: Plan) -> None:
    """Every parameter must be in the plan: one that is not would see some of the positions and learn from those alone.

    Raises:
        UserError: naming the modules that the layout says nothing of.
    """
    problems = [
        Problem(
            f"module {name!r} of the model",
            "it has parameters, and the layout does not say how tensor parallelism may divide it",
            "the model's plugin should name it in column, row or per_position",
        )
        for name, module in part.module.named_modules()
        if (name not in plan or matches(name, part.layout.regions)) and any(True for _ in module.parameters(recurse=False))
    ]
    if problems:
        raise UserError(*problems)


def _require_vocabulary_sharded(part: ModelPart) -> None:
    """
    Raises:
        UserError: the objective needs the logits of the whole vocabulary.
    """
    if not part.objective.vocabulary_sharded:
        raise UserError.one(
            "objective.name",
            "it is computed on the whole vocabulary, and tensor parallelism divides the logits",
            "set parallelism.disable_loss_parallel = true, which gathers them",
        )


def _enable_async(mesh: DeviceMesh, device: torch.device) -> None:
    """Let the compiler overlap the collectives of TP with the products beside them, through symmetric memory.

    Raises:
        UserError: not on this machine.
    """
    key = "parallelism.enable_async_tensor_parallel"
    if device.type != "cuda":
        raise UserError.one(key, f"symmetric memory needs CUDA, and this job runs on {device.type}", f"set {key} = false")
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group  # no public door to it yet (torch 2.15)

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
