"""Expert parallelism (Lepikhin et al., "GShard", arXiv 2006.16668, section 3). Each rank holds some of the experts. Rows are
sent to the ranks of their experts, and the outputs are sent back (:mod:`titan_experts.dispatch`).

Experts process tokens from all ranks of the view, so their gradients are complete over the view. They must be summed only
over the other ranks with different data, which FSDP gets from the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from titan_core.api import Experts, ModelLayout, ModelPart, TrainingContext
from titan_core.toolkit.local_shards import local_shard
from titan_experts.config import DISPATCH, VIEW, ExpertParallelKeys, folded, most_share
from titan_experts.dispatch import AllToAll, Dispatch, Padded
from titan_experts.torch_private import registered_parameters, substituted_parameters
from titan_nn.experts import BesideExperts

FREE_ROWS = 1024
"""Rows for which there is always room: the choices of few tokens differ most, such as those of the trial before training."""


def apply(part: ModelPart, context: TrainingContext[ExpertParallelKeys]) -> ModelPart:
    """Divide the modules that hold experts over the view ``ep``."""
    for path, module in list(part.named_modules()):
        rules = expert_rules(module, path, part.layout)
        if rules:
            before = dict(module.named_parameters(recurse=False))
            for name, rule in rules.items():
                module.register_parameter(name, _divided(before[name], rule.dim, context))
            inner: Any = module.forward
            module.forward = DividedExperts(module, inner, dispatch_of(path, part, context), tuple(rules))
        elif isinstance(module, BesideExperts):
            part.module.set_submodule(path, DuringExchange())
    return part


class DuringExchange(BesideExperts):
    """Lets divided experts compute something else while their rows are on their way."""

    def forward(
        self, experts: nn.Module, rows: Tensor, counts: Tensor, other: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See :class:`titan_nn.experts.BesideExperts`."""
        results: tuple[Tensor, Tensor] = experts(rows, counts, other)
        return results


def dispatch_of(path: str, part: ModelPart, context: TrainingContext[ExpertParallelKeys]) -> Dispatch:
    """Return what sends rows to the experts of the module called ``path``: another plugin's, if it has left one."""
    keys, mesh = context.section, context.mesh[VIEW]
    if made := part.entries(DISPATCH).get(path):
        return made(mesh)
    if keys.expert_parallel_dispatch == "alltoall":
        return AllToAll(mesh)
    return Padded(mesh, most_rows(path, context.job.model.layout, keys))


def most_rows(path: str, layout: ModelLayout, keys: ExpertParallelKeys) -> Callable[[int], int]:
    """Return (number of rows of this rank -> how many of them it can send to one rank)."""
    router = next((pattern for pattern in layout.routers if _same_block(pattern, path, layout)), None)
    share = most_share(None if router is None else layout.routers[router], keys)
    return lambda rows: max(math.ceil(rows * share), min(rows, FREE_ROWS))


def _same_block(pattern: str, path: str, layout: ModelLayout) -> bool:
    """Whether the routers called ``pattern`` are those of the blocks that contain the module ``path``."""
    prefix = f"{layout.blocks}."
    if not (pattern.startswith(prefix) and path.startswith(prefix)):
        return False
    block = pattern.removeprefix(prefix).partition(".")[0]
    return block in ("*", path.removeprefix(prefix).partition(".")[0])


def expert_rules(module: nn.Module, path: str, layout: ModelLayout) -> dict[str, Experts]:
    """Return the rules of the parameters that hold experts and that ``module``, named ``path``, owns itself."""
    rules = {name: layout.rule(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
    return {name: rule for name, rule in rules.items() if isinstance(rule, Experts)}


def _divided(whole: nn.Parameter, dim: int, context: TrainingContext[ExpertParallelKeys]) -> nn.Parameter:
    """Return this rank's experts of a parameter, which may already be divided or replicated over tensor parallelism, except
    over ranks among which the experts are divided."""
    mesh, lent = context.mesh, folded(context.job.mesh)
    names, placements = [VIEW], list[Placement]([Shard(dim % whole.dim())])
    if isinstance(whole, DTensor):
        earlier = dict(zip(whole.device_mesh.mesh_dim_names or (), whole.placements, strict=True))
        names += [name for name in earlier if name not in lent]
        placements += [placement for name, placement in earlier.items() if name not in lent]
    # The model is on the meta device, so there are no values to copy.
    empty = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    divided = distribute_tensor(empty, mesh[tuple(names)], placements)
    return nn.Parameter(divided, requires_grad=whole.requires_grad)


class DividedExperts:
    """Replaces the forward of a module that holds experts."""

    def __init__(self, module: nn.Module, inner: Any, dispatch: Dispatch, names: tuple[str, ...]) -> None:
        """
        Args:
            inner: the original forward, which computes with whichever experts the module holds.
            dispatch: sends rows to the ranks that the experts are divided over, and back.
            names: the module's parameters.
        """
        self._module, self._inner, self._dispatch, self._names = module, inner, dispatch, names

    def __call__(
        self, rows: Tensor, counts: Tensor, other: Callable[[], Tensor] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the outputs of the rows, and what ``other`` returns, if it is given.

        Args:
            rows: ``[rows, dim]``, sorted by expert.
            counts: number of rows of each expert, int64 ``[experts]``.
            other: is called while the rows are on their way to their experts.
        """
        if other is None:
            return self._dispatch(rows, counts, self._local_forward, None)
        results: list[Tensor] = []
        outputs = self._dispatch(rows, counts, self._local_forward, lambda: results.append(other()))
        return outputs, results[0]

    def _local_forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Call the original forward with this rank's experts, or its share of them under tensor parallelism, as parameters:
        plain tensors."""
        parameters: Mapping[str, Any] = registered_parameters(self._module)
        local = {name: local_shard(parameters[name]) for name in self._names}
        with substituted_parameters(self._module, local):
            output: Tensor = self._inner(rows, counts)
        return output
