"""A model's description of itself, so that transforms need not know its class.

A model plugin provides an ordinary ``nn.Module`` and a :class:`ModelLayout`. Transforms read the layout only. Names are
fully qualified module or parameter names; patterns are those of :func:`matches`. When the model is built,
:mod:`titan_core.model.layout_check` compares the layout with its modules, and :mod:`titan_core.model.layout_trial` with what
they compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING

from titan_core.api.model.initial_values import InitialValue
from titan_core.api.model.layout_rules import Column, Mixer, Router, Row, Rule
from titan_core.api.plugins.errors import shown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The structure of a decoder: ``embedding`` -> blocks -> ``head``.

    The model's ``forward(tokens, positions=None)`` takes token ids ``[batch, seq]`` and optionally the position of each
    token in its document, ``[batch, seq]`` (default: ``0 .. seq - 1``), and returns logits ``[batch, seq, vocab]``. It must
    call the modules of ``embedding``, each block of ``blocks`` in order, and the modules of ``head``. Each takes the hidden
    states ``[batch, seq, dim]`` as its first argument and returns hidden states; no other state may pass between blocks. If
    the model is split into pipeline stages, a later stage receives hidden states in place of ``tokens``, and always
    ``positions``; all other arguments of the blocks must be derived from these.

    Each parameter and each persistent buffer belongs to exactly one module of ``embedding``, ``blocks`` and ``head``.
    :mod:`titan_core.api.model.layout_rules` describes the values of :attr:`rules` and :attr:`mixers`.
    """

    # -- sizes
    num_blocks: int
    """Number of blocks."""
    dim: int
    """Width of the hidden states."""
    vocab_size: int
    """Rows of the embedding and width of the logits."""
    max_seq_len: int
    """Longest sequence that the model accepts, in tokens."""

    # -- module names
    embedding: tuple[str, ...]
    """Modules before the first block, in call order; the first one takes token ids."""
    blocks: str
    """The ``nn.ModuleList`` or ``nn.ModuleDict`` of the repeated blocks, whose names are ``0`` to ``num_blocks - 1``."""
    head: tuple[str, ...]
    """Modules after the last block, in call order; the last one returns the logits."""

    block_costs: tuple[float, ...] = ()
    """Compute cost of each block in any unit, such as floating-point operations per token; empty if all cost the same.
    Pipeline parallelism uses it to balance the stages."""

    # -- how parameters may be sharded
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """Pattern of parameter names -> how the parameter may be sharded; the first matching pattern applies. Parameters of the
    first module of ``embedding`` and of the last module of ``head`` need no rule: those with a vocabulary dimension are
    sharded over it, and the others are replicated."""
    regions: tuple[str, ...] = ()
    """Modules within which features are sharded (patterns). The input is gathered at the start of a region, and the partial
    outputs of the ranks are summed at its end, by its ``Row`` layers or its ``sums``. Each sharded parameter is in one
    region. A region without a sharded parameter is computed whole, for all positions, on each rank, which keeps its own
    positions: for attention whose projections cannot be sharded. What computes each position alone needs no region."""
    sums: tuple[str, ...] = ()
    """Modules at the end of a region that multiply by parameters of their own (patterns): the outputs of the ranks are
    summed. Layers with the rule ``Row`` need no entry."""

    # -- modules that mix positions
    mixers: Mapping[str, Mixer] = field(default_factory=dict)
    """Pattern of module names -> the computation of these modules, which mix positions. All other modules process each
    position independently. A parallelism that shards sequences replaces mixers of the kinds that it knows, and refuses
    others."""
    masks_documents: bool = False
    """Whether ``forward`` also takes ``documents``, ids ``[batch, whole seq]`` or ``None``, and passes them unchanged to
    each mixer as its last argument, so that no position depends on another document."""

    exact: tuple[str, ...] = ()
    """Parameters that compute in fp32 where others compute in a narrower type (patterns): a router, or the decay of a
    recurrence. Their gradients are summed in fp32. A module that owns one owns no others, and its ``forward`` converts what
    it receives, which may be of the narrower type, and what it returns."""

    routers: Mapping[str, Router] = field(default_factory=dict)
    """Pattern of module names -> the experts that these modules choose from, for each token. A block's router chooses from
    its parameters with the rule ``Experts`` of as many experts."""

    statistics: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of what modules of the model count in each step (:func:`~titan_core.api.add_statistic`)."""

    inputs: tuple[str, ...] = ()
    """Extra tensors of a batch (:class:`~titan_core.api.Extra`) that ``forward`` takes as keyword arguments."""
    states_per_position: int = 1
    """Number of hidden states that each position has between modules while the model is trained with :attr:`inputs` that
    add some, such as embeddings of later tokens. What passes from one pipeline stage to the next, and the logits, are then
    ``[states_per_position * batch, seq, ...]``. Each block takes and returns ``[batch, seq, dim]`` nevertheless."""

    saved_operators: tuple[str, ...] = ()
    """Operators of the blocks whose results selective activation checkpointing saves because they are expensive to recompute
    for their size. Names are those of torch's dispatcher (``"my_kernels::scan"``)."""

    # -- initial values
    parameters: Mapping[str, InitialValue] = field(default_factory=dict)
    """Pattern of parameter names -> initial value; the first matching pattern applies."""
    buffers: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    """Pattern of buffer names -> function that computes the buffer (on the CPU)."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name of a parameter -> name of the one that it shares (``{"output.weight": "tok_embeddings.weight"}``). The model's
    constructor shares it: ``self.output.weight = self.tok_embeddings.weight``. The key is the name whose module the
    constructor assigns later, and the parameter has the initial value of the other name."""

    def __post_init__(self) -> None:
        _require_sizes(self, "num_blocks", "dim", "vocab_size", "max_seq_len")
        if not all(isinstance(cost, int | float) and 0 <= cost < math.inf for cost in self.block_costs):
            raise ValueError(f"block_costs = {shown(self.block_costs)}; they must be finite, and at least 0")
        if not (isinstance(self.routers, Mapping) and all(isinstance(one, Router) for one in self.routers.values())):
            raise ValueError(f"routers = {shown(self.routers)}; it must map patterns to Routers")
        if not (isinstance(self.exact, tuple) and all(isinstance(pattern, str) for pattern in self.exact)):
            raise ValueError(f"exact = {shown(self.exact)}; it must be a tuple of patterns")
        if flaw := flaw_of_shapes(self.statistics):
            raise ValueError(flaw)

    def initial_value(self, parameter: str) -> InitialValue | None:
        """Return the initial value of ``parameter`` (fully qualified name), or ``None`` if no pattern matches."""
        return next((value for pattern, value in self.parameters.items() if matches(parameter, [pattern])), None)

    def rule(self, parameter: str) -> Rule | None:
        """Return the rule of ``parameter`` (fully qualified name), or ``None`` if no pattern matches."""
        return next((rule for pattern, rule in self.rules.items() if matches(parameter, [pattern])), None)

    def divides_linear(self, module: str) -> bool:
        """Whether ``module`` is a linear layer whose features may be sharded: its weight's rule is ``Column`` or ``Row``."""
        return isinstance(self.rule(f"{module}.weight"), Column | Row)

    def mixer(self, module: str) -> Mixer | None:
        """Return the mixer that ``module`` is, or ``None`` if it does not mix positions."""
        return next((mixer for pattern, mixer in self.mixers.items() if matches(module, [pattern])), None)

    def router(self, module: str) -> Router | None:
        """Return the router that ``module`` is, or ``None`` if it chooses no experts."""
        return next((router for pattern, router in self.routers.items() if matches(module, [pattern])), None)


def flaw_of_shapes(statistics: object) -> str:
    """Return what is wrong with the names and shapes of what modules count; empty if nothing is."""
    named = isinstance(statistics, Mapping) and all(isinstance(one, str) and one.isidentifier() for one in statistics)
    shapes = statistics.values() if named and isinstance(statistics, Mapping) else [None]
    if all(isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape) for shape in shapes):
        return ""
    must = "it must map names, each a word of letters, digits and _, to shapes: tuples of whole numbers, at least 1"
    return f"statistics = {shown(statistics)}; {must}"


def _require_sizes(holder: object, *names: str) -> None:
    for name in names:
        if type(size := vars(holder)[name]) is not int or size < 1:
            raise ValueError(f"{name} = {shown(size)}; it must be a whole number, at least 1")


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """The core's view of a model of a given size. Made without importing torch, which only ``build`` imports."""

    layout: ModelLayout
    """How the model is composed, sharded and initialised."""
    build: Callable[[], object]
    """Builds the ``nn.Module``. Called under ``torch.device("meta")``, so it must not compute with weights."""
    num_params: int
    """Number of parameters; tied parameters count once."""
    flops_per_token: Callable[[int], float]
    """Sequence length -> floating-point operations per token, forward and backward."""
    num_active_params: int | None = None
    """Number of parameters that a token uses: all but those of the experts that it does not pass through. Only shown.
    ``None``: all."""

    def __post_init__(self) -> None:
        _require_sizes(self, "num_params")
        active = self.num_active_params
        if active is not None and not (type(active) is int and 1 <= active <= self.num_params):
            must = f"it must be None or a whole number, from 1 to num_params = {self.num_params}"
            raise ValueError(f"num_active_params = {shown(active)}; {must}")
        if not isinstance(self.layout, ModelLayout):
            raise ValueError(f"layout = {shown(self.layout)}; it must be a ModelLayout")


# fnmatch keeps 256 patterns in Python 3.11, and a model of 100 blocks has more.
_matcher = lru_cache(maxsize=32768)(lambda pattern: re.compile(translate(pattern)).match)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` (``"layers.0.attention.wq"``) matches one of ``patterns`` (``"layers.*.wq"``): shell wildcards, in
    which ``*`` also matches dots. Titan has no other kind of pattern."""
    return any(_matcher(pattern)(name) for pattern in patterns)
