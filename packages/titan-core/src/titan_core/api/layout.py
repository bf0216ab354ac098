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
    """

    # -- sizes
    num_blocks: int
    """How many blocks there are."""
    dim: int
    """Width of the hidden states."""
    heads: int
    """Attention heads; tensor parallelism divides them."""
    kv_heads: int
    """Key/value heads (equal to ``heads`` without grouped-query attention)."""
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

    # -- how the linear layers may be divided (patterns of module names)
    column: tuple[str, ...] = ()
    """Linear layers that may be divided by output features (their outputs are used feature by feature or head by head)."""
    row: tuple[str, ...] = ()
    """Linear layers that may be divided by input features (their inputs are the outputs of divided columns)."""
    regions: tuple[str, ...] = ()
    """Modules that begin with ``column`` layers and end with ``row`` layers: between the two, features are divided. Each has
    both, and all of these layers are in one."""
    per_position: tuple[str, ...] = ()
    """Modules that treat each position by itself (norms), whose sequence may therefore be divided."""
    mixers: tuple[str, ...] = ()
    """Modules that mix positions, called with ``(q, k, v)``, each ``[batch, heads, seq, head_dim]``, returning the like
    of ``q``: causal softmax attention with the scale ``head_dim ** -0.5``, without its projections
    (:class:`titan_core.api.attention.CausalAttention` is one). The seam for context parallelism, which puts its own
    attention in their place."""
    masks_documents: bool = False
    """Whether ``forward`` takes ``documents`` too, ids ``[batch, whole seq]`` or ``None``, and each mixer is given them
    as fourth argument: attention then stays inside of a document."""

    inputs: tuple[str, ...] = ()
    """Extra tensors of a batch (:class:`~titan_core.api.batch.Extra`) that ``forward`` takes, as keywords of their names."""

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
