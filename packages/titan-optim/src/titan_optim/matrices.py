"""The parameters that Muon orthogonalises."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api import Experts, ModelLayout, OptimizerContext, ParameterRole, TrainedParameter, UserError, matches
from titan_optim.config import FusedSpec, MuonSection

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Matrices:
    """A parameter that is a matrix, or a stack of matrices: one for each expert."""

    parameter: nn.Parameter
    parts: tuple[int, ...]
    """Rows of each matrix that is orthogonalised by itself: several if they are stored as one."""
    stack: int | None = None
    """The dimension of the experts; ``None``: the parameter is one matrix."""

    @property
    def dims(self) -> tuple[int, int]:
        """The dimensions of rows and columns in the parameter."""
        rows, columns = (dim for dim in range(self.parameter.dim()) if dim != self.stack)
        return rows, columns

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of each matrix, whole."""
        rows, columns = self.dims
        return self.parameter.shape[rows], self.parameter.shape[columns]

    def local(self, tensor: Tensor) -> Tensor:
        """Return a view of this rank's shard of a ``tensor`` like the parameter: ``[matrices, rows, columns]``."""
        shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return shard[None] if self.stack is None else shard.movedim(self.stack, 0)


def is_orthogonalized(parameter: TrainedParameter, layout: ModelLayout, section: MuonSection) -> bool:
    """Whether Muon updates ``parameter``: a matrix of a hidden layer, or experts' matrices. Other stacks, such as kernels of
    convolutions, are not known to be matrices."""
    if matches(parameter.name, section.exclude):
        return False
    if parameter.role is ParameterRole.HIDDEN_STACK:
        return isinstance(layout.rule(parameter.name), Experts) and len(parameter.shape) == 3
    return parameter.role is ParameterRole.HIDDEN_MATRIX


def matrices_of(parameter: TrainedParameter, layout: ModelLayout, section: MuonSection) -> Matrices:
    """Describe a parameter that Muon updates.

    Raises:
        UserError: its rows are not those of the matrices that ``muon.fused`` names.
    """
    rule = layout.rule(parameter.name)
    stack = rule.dim % 3 if isinstance(rule, Experts) and len(parameter.shape) == 3 else None
    found = Matrices(parameter.tensor, (), stack)
    spec = next((spec for spec in section.fused if matches(parameter.name, [spec.pattern])), None)
    return Matrices(parameter.tensor, _parts(parameter.name, found.shape[0], spec), stack)


def _parts(name: str, rows: int, spec: FusedSpec | None) -> tuple[int, ...]:
    if spec is None:
        return (rows,)
    if rows % sum(spec.rows):
        why = f"parameter {name!r} has {rows} rows, which {spec.rows} does not divide"
        raise UserError.one(f"muon.fused, pattern {spec.pattern!r}", why, "set the rows of its matrices, in proportion")
    return tuple(rows // sum(spec.rows) * part for part in spec.rows)


def chosen_matrices(context: OptimizerContext[MuonSection]) -> dict[nn.Parameter, Matrices]:
    """Return the parameters of this rank that Muon updates, and log how many there are.

    Raises:
        UserError: a parameter does not consist of the matrices that ``muon.fused`` names, or a pattern matches none.
    """
    layout, section = context.job.model.layout, context.section
    if section.exclude or section.fused:
        # A stage of a pipeline has only some of the parameters.
        with torch.device("meta"):
            model: Any = context.job.model.build()
        require_matches([name for name, _ in model.named_parameters()], section)
    everything = [parameter for group in context.groups for parameter in group.parameters]
    chosen = [parameter for parameter in everything if is_orthogonalized(parameter, layout, section)]
    found = {parameter.tensor: matrices_of(parameter, layout, section) for parameter in chosen}
    log.info("%s", _summary(list(found.values()), len(everything)))
    return found


def require_matches(names: Sequence[str], section: MuonSection) -> None:
    """
    Args:
        names: of all parameters of the model.

    Raises:
        UserError: a pattern of the section matches no parameter.
    """
    patterns = [("muon.exclude", pattern) for pattern in section.exclude]
    patterns += [("muon.fused", spec.pattern) for spec in section.fused]
    for key, pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            fix = f"match parameters such as {names[0]} or {names[-1]}"
            raise UserError.one(f"{key}, pattern {pattern!r}", "matches no parameter", fix)


def _summary(found: Sequence[Matrices], parameters: int) -> str:
    stacks = sum(one.stack is not None for one in found)
    fused = sum(len(one.parts) > 1 for one in found)
    kinds = [f"{len(found) - stacks} matrices"]
    kinds += [f"{stacks} stacks of experts"] if stacks else []
    text = " and ".join(kinds) + (f" ({fused} of them fused)" if fused else "")
    return f"Muon orthogonalises {text} of this rank; AdamW updates its {parameters - len(found)} other parameters"
