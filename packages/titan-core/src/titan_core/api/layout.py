"""What a model says of itself, so that transforms need not know its class.

A model plugin gives an ordinary ``nn.Module`` and a :class:`ModelLayout`. Transforms read the layout alone. Names are
fully qualified module or parameter names; patterns are those of :mod:`titan_core.api.tools.patterns`.
:mod:`titan_core.model.layout_check` compares a layout with its model when the model is built, and
:mod:`titan_core.model.layout_trial` with what the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan_core.api.initial_values import InitialValue
from titan_core.api.layout_rules import Column, Mixer, Row, Rule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The structure of a decoder: ``embedding`` -> blocks -> ``head``.

    The model's ``forward(tokens, positions=None)`` takes token ids ``[batch, seq]`` and optionally the position of each
    token in its document, ``[batch, seq]`` (``0 .. seq - 1`` where absent), and returns logits ``[batch, seq, vocab]``.
    It must call the modules of ``embedding``, each block of ``blocks`` in order, and the modules of ``head``, each with
    the hidden states ``[batch, seq, dim]`` as first argument and as result, and keep no other state between blocks. Where
    the model is cut into stages, a later stage is called with hidden states in the place of ``tokens``, and always with
    ``positions``; what else the blocks are given must come from those.

    Each parameter and each persistent buffer belongs to exactly one module of ``embedding``, ``blocks`` and ``head``.
    What :attr:`rules` and :attr:`mixers` hold is described in :mod:`titan_core.api.layout_rules`.
    """

    # -- sizes
    num_blocks: int
    """How many blocks there are."""
    dim: int
    """Width of the hidden states."""
    vocab_size: int
    """Rows of the embedding and width of the logits."""
    max_seq_len: int
    """The longest sequence, in tokens, that the model can take."""

    # -- where things are
    embedding: tuple[str, ...]
    """Modules before the first block, in the order of their calls; the first one takes token ids."""
    blocks: str
    """The ``nn.ModuleList`` or ``nn.ModuleDict`` of the repeated blocks, which are called ``0`` to ``num_blocks - 1``."""
    head: tuple[str, ...]
    """Modules after the last block, in the order of their calls; the last one gives the logits."""

    block_costs: tuple[float, ...] = ()
    """What each block costs to compute, in any unit (floating-point operations of a token, for example); empty: all cost the
    same. Pipelines balance their stages by it."""

    # -- how parameters may be divided
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """Pattern of parameter names -> how that parameter may be divided; the first pattern that matches decides. Parameters of
    the first module of ``embedding`` and of the last module of ``head`` need no rule: their vocabulary is divided, and all
    else there is whole on each rank."""
    regions: tuple[str, ...] = ()
    """Modules inside of which features are divided (patterns): the input is gathered where one begins, and what ranks
    compute of its output is summed where it ends, by its ``Row`` layers or its ``sums``. Each has a divided parameter, and
    each divided parameter is in one."""
    sums: tuple[str, ...] = ()
    """Modules that multiply with parameters of their own where a region ends (patterns): what each rank returns is summed.
    Layers with the rule ``Row`` need no entry."""

    # -- what mixes positions
    mixers: Mapping[str, Mixer] = field(default_factory=dict)
    """Pattern of module names -> what these modules, which mix positions, compute. All other modules treat each position by
    itself. A parallelism that divides sequences replaces mixers of the kinds that it knows, and refuses others."""
    masks_documents: bool = False
    """Whether ``forward`` takes ``documents`` too, ids ``[batch, whole seq]`` or ``None``, and each mixer receives them
    as its last argument: no position then depends on another document."""

    inputs: tuple[str, ...] = ()
    """Extra tensors of a batch (:class:`~titan_core.api.batch.Extra`) that ``forward`` takes, as keywords of their names."""

    saved_operators: tuple[str, ...] = ()
    """Operators of the blocks whose results selective recomputation keeps, as torch's dispatcher names them
    (``"my_kernels::scan"``): what is expensive to compute again for its size."""

    # -- first values
    parameters: Mapping[str, InitialValue] = field(default_factory=dict)
    """Pattern of parameter names -> first value; the first pattern that matches decides."""
    buffers: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    """Pattern of buffer names -> function computing the buffer (on the CPU)."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Parameter name -> name of the parameter that it shares (``{"output.weight": "tok_embeddings.weight"}``)."""

    def initial_value(self, parameter: str) -> InitialValue | None:
        """The first value of ``parameter`` (a fully qualified name), or ``None`` where no pattern matches."""
        from titan_core.api.tools.patterns import matches

        return next((value for pattern, value in self.parameters.items() if matches(parameter, [pattern])), None)

    def rule(self, parameter: str) -> Rule | None:
        """The rule of ``parameter`` (a fully qualified name), or ``None`` where no pattern matches."""
        from titan_core.api.tools.patterns import matches

        return next((rule for pattern, rule in self.rules.items() if matches(parameter, [pattern])), None)

    def divides_linear(self, module: str) -> bool:
        """Whether ``module`` is a linear layer whose features may be divided: its weight's rule is ``Column`` or ``Row``."""
        return isinstance(self.rule(f"{module}.weight"), Column | Row)

    def mixer(self, module: str) -> Mixer | None:
        """What ``module`` computes if it mixes positions; ``None`` for all others."""
        from titan_core.api.tools.patterns import matches

        return next((mixer for pattern, mixer in self.mixers.items() if matches(module, [pattern])), None)


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """All that the core wants to know of a model of a given size. Made without importing torch; ``build`` imports it."""

    layout: ModelLayout
    build: Callable[[], object]
    """Builds the ``nn.Module``; called under ``torch.device("meta")``, so it must not compute on weights."""
    num_params: int
    """Number of parameters, tied ones counted once."""
    flops_per_token: Callable[[int], float]
    """Sequence length -> floating-point operations of forward and backward for one token."""
