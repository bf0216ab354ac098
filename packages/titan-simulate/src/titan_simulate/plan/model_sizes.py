"""Sizes of the parts of a model, by the ways to shard them. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from titan_core.api import (
    Column,
    Experts,
    Mixer,
    ModelDefinition,
    ModelLayout,
    Replicate,
    Row,
    Rule,
    Shard,
    UserError,
    matches,
)


@dataclass(frozen=True)
class Matrix:
    """A weight that multiplies each position."""

    inner: int
    outer: int
    rule: Rule | None
    copies: float = 1.0
    """Matrices of this shape that each position passes through: the chosen ones of a layer of experts."""
    experts: int = 0
    """Number of those that positions choose from; 0 if they do not."""

    @property
    def divides_inner(self) -> bool:
        """Whether a dimension that divides weights divides the inner dimension."""
        return isinstance(self.rule, Row)

    @property
    def divides_outer(self) -> bool:
        """Whether a dimension that divides weights divides the outer dimension."""
        return isinstance(self.rule, Column)


@dataclass
class Held:
    """Numbers of parameters, by what divides them."""

    replicated: int = 0
    """Parameters that each rank holds whole, apart from data parallelism."""
    divided: int = 0
    """Parameters that dimensions divide which divide weights."""
    experts: int = 0
    """Parameters that views of the mesh divide."""
    divided_experts: int = 0
    """Parameters that both divide."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.replicated + self.divided + self.experts + self.divided_experts

    def count(self, rule: Rule | None, size: int, divided: bool) -> None:
        """Count a parameter of ``size`` elements; ``divided``: whether dimensions divide it which divide weights."""
        if isinstance(rule, Experts):
            self.divided_experts += size if divided else 0
            self.experts += 0 if divided else size
        else:
            self.divided += size if divided else 0
            self.replicated += 0 if divided else size


@dataclass
class Unit(Held):
    """A module that no stage of a pipeline divides: a unit of the embedding or of the head, or a block. Sizes in numbers."""

    exact: Held = field(default_factory=Held)
    """Of the parameters, those that compute in fp32 under mixed precision."""
    matrices: list[Matrix] = field(default_factory=list)
    regions: int = 0
    """Modules around whose features dimensions that divide weights communicate."""
    shared: int = 0
    """Features of a position, of activations that all ranks hold which divide weights: the inputs of regions."""
    split: float = 0.0
    """Features of a position, of all other activations."""
    mixers: list[Mixer] = field(default_factory=list)
    routed: float = 0.0
    """Features of a position that are sent to experts."""
    of_experts: float = 0.0
    """Of ``split``, those of experts."""
    weights: list[tuple[int, int, int]] = field(default_factory=list)
    """Rows, columns and number of the matrices that the optimizer updates, each expert's by itself."""


@dataclass(frozen=True)
class ModelSizes:
    """The units of a model, in order."""

    units: Mapping[str, Unit]
    dim: int
    vocab_size: int
    blocks: tuple[str, ...]
    num_experts: tuple[int, ...]
    """The numbers of experts that layers have, without repetition; empty for a model without experts."""
    matmul_flops: float
    """Floating-point operations per token, forward and backward, without those of mixers."""
    mixer_flops: float
    """Those of mixers, which grow with the sequence."""
    ties: tuple[tuple[str, str, int], ...] = ()
    """Parameters that two units share: unit, the unit that counts them, and their number. Where stages of a pipeline
    separate the two, both hold them."""
    states: int = 1
    """Hidden states of a position that pass from stage to stage."""


def sizes_of(
    definition: ModelDefinition, parameters: Mapping[str, tuple[int, ...]], modules: Iterable[str], seq_len: int
) -> ModelSizes:
    """Return the sizes of the model whose parameters have these shapes, on sequences of ``seq_len`` tokens.

    Raises:
        UserError: the layout does not say where a parameter belongs.
    """
    layout = definition.layout
    blocks = tuple(f"{layout.blocks}.{index}" for index in range(layout.num_blocks))
    units = {name: Unit() for name in (*layout.embedding, *blocks, *layout.head)}
    matmul_flops = definition.flops_per_token(1)
    modules = list(modules)
    routers = [(next((unit for unit in _prefixes(name) if unit in units), None), layout.router(name)) for name in modules]
    left = _share_left(layout, parameters, matmul_flops)
    experts: dict[int, None] = {}
    for name, shape in parameters.items():
        unit = units[_unit_of(name, units)]
        rule, size = layout.rule(name), math.prod(shape)
        outermost = name.rpartition(".")[0] in (layout.embedding[0], layout.head[-1])
        divided = isinstance(rule.within if isinstance(rule, Experts) else rule, Column | Row | Shard)
        divided |= rule is None and outermost and layout.vocab_size in shape
        unit.count(rule, size, divided)
        if matches(name, layout.exact):
            unit.exact.count(rule, size, divided)
        if isinstance(rule, Experts):
            experts[shape[rule.dim]] = None
            within = (router for owner, router in routers if router is not None and owner == _unit_of(name, units))
            chosen = next(
                (router.per_token / router.experts for router in within if router.experts == shape[rule.dim]), left
            )
            rest = [length for dim, length in enumerate(shape) if dim != rule.dim % len(shape)]
            if len(rest) == 2:
                unit.weights.append((rest[0], rest[1], shape[rule.dim]))
            if len(rest) > 1:
                unit.matrices.append(Matrix(rest[-1], rest[0], rule, shape[rule.dim] * chosen, shape[rule.dim]))
            unit.routed = max(unit.routed, layout.dim * shape[rule.dim] * chosen)
            continue
        if len(shape) == 2:
            unit.weights.append((shape[0], shape[1], 1))
        if len(shape) > 1 and not (rule is None and name.startswith(f"{layout.embedding[0]}.")):
            unit.matrices.append(Matrix(math.prod(shape[1:]), shape[0], rule))
    ties = []
    for name, source in layout.tied.items():
        copy, original, shape = _unit_of(name, units), _unit_of(source, units), parameters[source]
        if copy != original:
            ties.append((copy, original, math.prod(shape)))
            if len(shape) > 1:
                units[copy].matrices.append(Matrix(math.prod(shape[1:]), shape[0], layout.rule(name)))
    for name in modules:
        owner = next((block for block in _prefixes(name) if block in units), None)
        if owner is None:
            continue
        unit, mixer = units[owner], layout.mixer(name)
        unit.regions += matches(name, layout.regions)
        if mixer is not None:
            unit.mixers.append(mixer)
    for name in blocks:
        _activations(units[name], layout.dim)
    return ModelSizes(
        units, layout.dim, layout.vocab_size, blocks, tuple(experts), matmul_flops,
        max(0.0, definition.flops_per_token(seq_len) - matmul_flops), tuple(ties), layout.states_per_position,
    )  # fmt: skip


def _share_left(layout: ModelLayout, parameters: Mapping[str, tuple[int, ...]], matmul_flops: float) -> float:
    """Return the share of the experts that a token passes through, of a model that declares no routers: what its operations
    leave for them."""
    total = others = 0
    most = 1
    for name, shape in parameters.items():
        rule = layout.rule(name)
        if isinstance(rule, Experts):
            total += math.prod(shape)
            most = max(most, shape[rule.dim])
        elif name in layout.tied.values() or not name.startswith(f"{layout.embedding[0]}."):
            others += math.prod(shape)
    return min(1.0, max(1.0 / most, (matmul_flops / 6 - others) / total)) if total else 1.0


def keys_of(mixer: Mixer, dim: int) -> int:
    """Return the features of a position's keys and values, or of what a mixer of another kind may exchange: hidden states.

    Args:
        dim: features of the hidden states.
    """
    if mixer.heads is None or mixer.key_heads is None:
        return dim
    return 2 * dim * mixer.key_heads // mixer.heads


def _activations(unit: Unit, dim: int) -> None:
    """Set the features that a block keeps for backward: each matrix's input and output, and the residual stream around them.
    Matrices at the start of a region read the same input."""
    unit.shared = unit.regions * dim
    unit.split = 4.0 * dim
    for matrix in unit.matrices:
        if matrix.divides_outer:
            unit.split += matrix.outer
        elif isinstance(matrix.rule, Replicate):
            unit.split += matrix.inner + matrix.outer
        else:
            unit.split += (matrix.inner + matrix.outer) * matrix.copies
        if isinstance(matrix.rule, Experts):
            unit.of_experts += (matrix.inner + matrix.outer) * matrix.copies


def _unit_of(parameter: str, units: Mapping[str, Unit]) -> str:
    found = next((name for name in _prefixes(parameter) if name in units), None)
    if found is None:
        why = f"parameter {parameter!r} is in no block, and in no module of embedding and head"
        raise UserError.one("the model's layout", why, "add its module to the layout")
    return found


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))
