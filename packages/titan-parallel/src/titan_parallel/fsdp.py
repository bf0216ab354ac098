"""Data parallelism. FSDP2's ``fully_shard`` provides all three kinds: over a mesh of one dimension it shards parameters,
gradients and optimizer state (FSDP); over two it shards over the inner and replicates over the outer (HSDP); if the inner
dimension has size 1 it only replicates (DDP), as torch's own ``replicate`` does.

The mesh determines the ranks for each parameter (:meth:`JobMesh.data_mesh`), so no dimension is named here. Modules whose
parameters an earlier transform has sharded over a view of the mesh (experts) are FSDP units of their own, and so are those
whose parameters compute in fp32 under mixed precision (:attr:`ModelLayout.exact`), one unit for those of each block.

TorchTitan paper, arXiv 2410.06511, section 2.1; Zhao et al., arXiv 2304.11277.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titan_core.api import JobMesh, ModelPart, TrainingContext, UserError, matches
from titan_core.api.config.sections import TrainingSection
from titan_parallel.checks import is_active
from titan_parallel.config import CompileSection, FSDPKeys


def apply(part: ModelPart, context: TrainingContext[FSDPKeys]) -> ModelPart:
    """Make the embedding, each block and the head, or several small ones, FSDP units. Gradients are summed, not averaged."""
    policy = context.section.fsdp_reshard_after_forward
    if policy == "default" and context.job.mesh.degree("pp") > 1:
        policy = "never"  # otherwise each microbatch would gather every parameter again
    training = context.job.section(TrainingSection)
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Hidden states already have the embedding's dtype; other inputs of a block (rotary tables) must stay exact.
        cast_forward_inputs=False,
    )
    offload = OffloadPolicy()
    if training.enable_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
        part.parameters_on = torch.device("cpu")
    layout = part.layout

    def shard(
        modules: list[nn.Module],
        reshard: bool,
        view: str | None = None,
        precision: MixedPrecisionPolicy = mixed_precision,
    ) -> None:
        modules = [module for module in modules if not isinstance(module, FSDPModule)]  # others are units already
        if modules:
            mesh = context.mesh.data_mesh(view)
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                shard_placement_fn=partial(dimension_to_shard, mesh.shape[-1]),
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshard,
            )

    exact = exact_modules(part, context)
    small = _may_be_grouped([module for _, modules in exact for module in modules], context, torch.float32)
    for view, modules in exact:
        shard(modules, policy == "always" or (policy == "default" and not small), view, _EXACT)
    nested = on_views(part, context.mesh)
    for view, module in nested:
        shard([module], policy != "never", view)
    embedding = list(part.present(layout.embedding).values())
    head = list(part.present(layout.head).values())
    blocks = list(part.blocks().values())
    if _may_be_grouped([*embedding, *blocks, *head], context):
        shard([*embedding, *blocks, *head], reshard=policy == "always")
    else:
        if layout.tied:
            # Modules that share a parameter must be one unit.
            shard([*embedding, *head], reshard=policy == "always")
        else:
            shard(embedding, reshard=policy != "never")
            if all(isinstance(module, nn.Embedding) and module.max_norm is None for module in embedding):
                for module in embedding:
                    assert isinstance(module, FSDPModule)
                    module.set_unshard_in_backward(False)  # the gradient of a table needs the rows' numbers, not the rows
        groups = _groups(blocks, context)
        for group in groups:
            # Backward needs the last group next after the head. A small one need not be gathered again.
            kept = policy == "default" and group is groups[-1] and _may_be_grouped(group, context)
            shard(group, reshard=policy != "never" and not kept)
        if not layout.tied:
            shard(head, reshard=policy == "always")
        if len(groups) == len(blocks):
            _prefetch(blocks, [module for _, module in nested])
    shard([part.module], reshard=policy == "always")
    _sum_gradients(part.module)
    # Backward passes reshard parameters. After an evaluation, which has none, the optimizer and checkpoints would find them
    # gathered.
    part.after_evaluation += tuple(unit.reshard for unit in part.module.modules() if isinstance(unit, FSDPModule))
    return part


def _prefetch(blocks: list[nn.Module], nested: list[nn.Module]) -> None:
    """Let each block that has units of its own gather them and the next block when it starts. Within it, the host may wait
    for the device, and FSDP gathers the next unit only once the host calls it."""
    units = [block for block in blocks if isinstance(block, FSDPModule)]
    for index, block in enumerate(units):
        inner = [module for module in block.modules() if module in nested and isinstance(module, FSDPModule)]
        if inner:
            block.set_modules_to_forward_prefetch([*inner, *units[index + 1 : index + 2]])
            block.set_modules_to_backward_prefetch([*inner, *units[max(0, index - 1) : index]])


MOST_UNEVEN = 1.1
"""Largest share of a parameter, as a multiple of the even one, for which it is still divided along its first dimension,
whose shards need no copies in communication."""
_EXACT = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)


def gathered_within_blocks(part: ModelPart, context: TrainingContext[Any]) -> list[str]:
    """Return the names of modules within blocks that are units of their own. FSDP gathers them in hooks that compilers do
    not see, so they interrupt compiled blocks."""
    if not is_active(context):
        return []
    units = {id(module) for _, modules in exact_modules(part, context) for module in modules}
    units |= {id(module) for _, module in on_views(part, context.mesh)}
    inside = tuple(f"{block}." for block in part.blocks())
    return [path for path, module in part.named_modules() if id(module) in units and path.startswith(inside)]


def exact_modules(part: ModelPart, context: TrainingContext[Any]) -> list[tuple[str | None, list[nn.Module]]]:
    """Return the modules whose parameters compute in fp32 under mixed precision, each with the view of the mesh that its
    parameters are sharded over: those of a block, of the embedding or of the head together, or each alone if blocks are
    compiled."""
    training = context.job.section(TrainingSection)
    if {training.mixed_precision_param, training.mixed_precision_reduce} == {"float32"}:
        return []
    compiled = context.job.section(CompileSection).compiles_blocks
    units = [*part.present(part.layout.embedding), *part.blocks(), *part.present(part.layout.head)]
    found: dict[str, nn.Module] = {}
    groups: dict[tuple[str, str | None], list[nn.Module]] = {}
    for path, module in part.named_modules():
        own = dict(module.named_parameters(path, recurse=False))
        if not any(matches(name, part.layout.exact) for name in own):
            continue
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        found[path] = module
        unit = next((unit for unit in units if f"{path}.".startswith(f"{unit}.")), path)
        view = context.mesh.view_of(next(iter(own.values())))
        groups.setdefault((path if compiled else unit, view), []).append(module)
    return [(view, modules) for (_, view), modules in groups.items()]


def _groups(blocks: list[nn.Module], context: TrainingContext[FSDPKeys]) -> list[list[nn.Module]]:
    """Divide ``blocks``, in order, into groups to gather together: one block each, or several small ones."""
    groups: list[list[nn.Module]] = []
    for block in blocks:
        if groups and _may_be_grouped([*groups[-1], block], context):
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _may_be_grouped(modules: list[nn.Module], context: TrainingContext[FSDPKeys], dtype: torch.dtype | None = None) -> bool:
    """Whether ``modules`` can be one unit, gathered together: within ``fsdp_group_mib``, in ``dtype`` or that of the job.

    Compiled blocks cannot: a group's hooks depend on which of its modules have run, and compiled code has them as they were
    when it was traced.
    """
    if context.job.section(CompileSection).compiles_blocks:
        return False
    parameters = [parameter for module in modules for parameter in module.parameters()]
    dtype = dtype or getattr(torch, context.job.section(TrainingSection).mixed_precision_param)
    gathered: int = dtype.itemsize * sum(_local(parameter).numel() for parameter in parameters)
    alike = len({parameter.dtype for parameter in parameters}) <= 1  # FSDP gathers only one dtype together
    return alike and gathered <= context.section.fsdp_group_mib * 2**20


def dimension_to_shard(shards: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dimension of a rank's parameter to divide into ``shards``, or ``None`` for the first.

    If a dimension does not divide evenly, every rank allocates the largest shard: with two experts on four ranks, twice the
    even share, while two ranks hold nothing. FSDP shards other dimensions only evenly.
    """
    local = _local(parameter)
    rows, *others = local.shape or (1,)
    even = math.ceil(rows / shards) * shards <= MOST_UNEVEN * rows
    if even or hasattr(local, "fsdp_pre_all_gather"):  # float8 weights: what they gather are rows
        return None
    return next((Shard(dim) for dim, length in enumerate(others, 1) if length % shards == 0), None)


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def on_views(part: ModelPart, mesh: JobMesh) -> list[tuple[str, nn.Module]]:
    """Return the modules whose parameters are sharded over a view of the mesh, each with its view.

    Raises:
        UserError: Only some parameters of a module are on a view; FSDP cannot gather them together.
    """
    found: dict[str, tuple[str, nn.Module]] = {}
    for path, module in part.named_modules():
        views = {mesh.view_of(parameter) for parameter in module.parameters(recurse=False)}
        view = next((view for view in views if view is not None), None)
        if view is None or any(path.startswith(f"{outer}.") for outer in found):
            continue
        if {mesh.view_of(parameter) for parameter in module.parameters()} != {view}:
            why = f"only some of its parameters are sharded over the mesh view {view!r}, but FSDP gathers them together"
            raise UserError.one(f"module {path!r} of the model", why, "move those into a module of their own")
        found[path] = view, module
    return list(found.values())


def _sum_gradients(module: nn.Module) -> None:
    """Make FSDP sum gradients over ranks: the loss is already divided by the weight of the global batch.

    Neither setting propagates to nested modules. gloo has no scaled reduction, hence the second setting.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)
