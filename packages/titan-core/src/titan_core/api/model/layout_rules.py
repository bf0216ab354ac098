"""Layout rules for parameters and modules: how they may be sharded, and which modules mix positions. Free of torch.

The tensor-parallel rules follow Megatron-LM (Shoeybi et al., arXiv 1909.08053). Inside a *region*, each rank computes a
share of the features. A layer at the start of a region takes full inputs and returns a share of its outputs (``Column``, or
``Shard`` for a parameter of any other module). A layer at its end takes a share of its inputs and returns a partial sum,
which is summed over ranks (``Row``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from titan_core.api.plugins.ref import Ref


@dataclass(frozen=True)
class Column:
    """Weight or bias of an ``nn.Linear``, sharded over its output features. These must be consumed feature by feature or
    head by head."""


@dataclass(frozen=True)
class Row:
    """Weight or bias of an ``nn.Linear``, sharded over its input features, the outputs of earlier sharded layers."""


@dataclass(frozen=True)
class Shard:
    """A parameter of any module, sharded along ``dim``, the dimension of its region's sharded features. The module computes
    with this rank's shard, a plain tensor, as it would with the full parameter."""

    dim: int
    """0, 1, ...; -1 is the last dimension."""
    norm: bool = False
    """Whether the module is an RMSNorm or LayerNorm over the sharded features (OLMo-2's norm of the queries of all heads).
    Its means are then those of all ranks' features. All parameters of the module (``weight``, ``bias``) have this rule. The
    module may be of any class, takes one tensor, ``[..., features]``, and is refused if it computes anything else."""


@dataclass(frozen=True)
class Replicate:
    """A parameter that is replicated on every rank that uses it. Outside regions, its module must process each position
    independently (as a norm does) and receives this rank's positions only.

    A rank's gradient is an addend: inside a region, of what its share of the features adds, and outside, of its positions if
    ranks have different ones. Tensor parallelism sums the addends over ranks once in each step, before other observers'
    ``titan_gradients_complete``, so the module must not."""


@dataclass(frozen=True)
class Experts:
    """A parameter that holds one expert's weights at each index of ``dim``. Expert parallelism gives each rank some of the
    experts and calls their module with fewer experts.

    The module that owns the parameter must own no parameters with other rules. It is called with ``(rows, counts)``:
    ``rows``, ``[rows, dim]``, sorted by expert, and ``counts``, int64 ``[experts]``, the number of rows per expert. It
    returns a tensor like ``rows``, each row computed by its expert alone.

    There may be more rows than ``counts.sum()``: the last ones then belong to no expert. What they return is ignored, and
    their gradient must be zero. An expert's rows may include padding, rows of zeros whose results are ignored.
    :func:`titan_nn.experts.grouped_linear` computes so, and a child module :class:`titan_nn.experts.GroupedLinear`, with
    which transforms can replace the products."""

    dim: int = 0
    """Dimension whose indices are the experts."""
    within: Shard | Replicate = Replicate()
    """How tensor parallelism may shard each expert. ``Shard.dim`` counts dimensions of the full parameter."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """A module that chooses the experts of each token.

    It is called with tokens, ``[tokens, dim]`` or ``[batch, seq, dim]``, and returns ``(weights, chosen, scores)``:

    * ``weights``, ``[tokens, per_token]``: the weights of the outputs of the chosen experts;
    * ``chosen``, int64 ``[tokens, per_token]``: their indices;
    * ``scores``, fp32 ``[tokens, experts]``: the normalised affinities of all experts, which are not negative, before any
      bias: the probabilities of a softmax, or the scores of a sigmoid.

    Its child module ``choice``, an :class:`~titan_nn.experts.ExpertChoice` or a module like it, turns scores into
    ``chosen``. Transforms that force a choice wrap it. Those that balance the experts wrap the router and change its
    ``bias``.

    A router that computes ``scores`` from logits passes them, fp32 ``[tokens, experts]``, through a child module ``logits``,
    such as ``nn.Identity()``, so that a transform can add a loss of them, and uses what it returns.

    Raises:
        ValueError: a token passes through no expert, or through more than there are.
    """

    experts: int
    """Number of experts that it chooses from."""
    per_token: int
    """Number of experts that each token passes through; those that all tokens pass through are not counted."""
    bias: str | None = "choice.bias"
    """Name, within the router, of a persistent buffer, fp32 ``[experts]``, that is added to the scores for the choice only.
    The buffer may be ``None``, or absent; ``None`` here: no router of the model has one."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.experts:
            raise ValueError(f"a router of {self.experts} experts cannot choose {self.per_token}")


Rule = Column | Row | Shard | Replicate | Experts
"""One of the five ways to shard a parameter."""

CAUSAL_ATTENTION: Final = "causal_attention"
"""The kind of mixers that compute causal softmax attention."""


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """A module that mixes positions.

    It may own parameters, with rules and initial values like any others, unless it computes causal attention or has
    :attr:`heads_dim`: such a mixer receives all that it computes with as arguments. If ranks have different positions, each
    computes the gradients of its own, and data parallelism sums them."""

    kind: str
    """The computation: :data:`CAUSAL_ATTENTION` (see :func:`causal_attention`), or a name that the model chooses, such as
    ``"gated_recurrence"``."""
    heads: int | None = None
    """Number of heads, if it has heads; tensor parallelism shards over them."""
    kv_heads: int | None = None
    """Number of key/value heads, if smaller (grouped-query attention); ``None``: ``heads``."""
    sequence_dim: int = 1
    """Dimension of positions in the argument tensors and in the returned tensor."""
    heads_dim: int | None = None
    """For kinds that the model defines: dimension of heads in the argument tensors and in the returned tensor, if the mixer
    computes each head from that head's arguments alone. Ranks may then divide the heads: the module has no parameters of its
    own, and its arguments are tensors with positions and ``heads`` or ``kv_heads`` heads, tensors ``[heads]`` or
    ``[kv_heads]``, ``documents``, and values that are no tensors. ``None``: each rank computes all heads that it has."""
    divided: Ref[Callable[..., Any]] | None = None
    """For kinds that the model defines: the computation if each rank has only some of the positions. ``(module, share)`` ->
    a function that replaces the module's forward, and takes and returns tensors of this rank's positions. ``share`` is a
    :class:`~titan_core.api.SequenceShare`. ``None``: sequences cannot be sharded."""
    window: int | None = None
    """Of causal attention: number of positions that a query sees, its own included; ``None``: all."""
    softcap: float | None = None
    """Of causal attention: cap ``c`` of the scores, which become ``c * tanh(score / c)``."""
    scale: float | None = None
    """Of causal attention: factor of the scores; ``None``: ``head_dim ** -0.5``."""
    sinks: bool = False
    """Of causal attention: whether each head has a sink, a score of its own in the softmax without a value."""
    trial_positions: int | None = None
    """Positions of a sequence that shows all that the mixer computes, such as two chunks of a chunked computation; ``None``:
    any 16. Trials of the model have sequences of at least this length."""

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("a mixer's kind must not be empty")
        for name, value in self.options.items():
            if value is not None and value is not False and (self.kind != CAUSAL_ATTENTION or not value > 0):
                raise ValueError(f"a mixer of kind {self.kind!r} cannot have {name} = {value}")
        if self.trial_positions is not None and self.trial_positions < 1:
            raise ValueError(f"trial_positions must be at least 1, not {self.trial_positions}")
        if self.heads is None and (self.kv_heads is not None or self.kind == CAUSAL_ATTENTION):
            raise ValueError(f"a mixer of kind {self.kind!r} with kv_heads {self.kv_heads} needs heads")
        if self.heads_dim is not None and (self.heads is None or self.heads_dim in (0, self.sequence_dim)):
            raise ValueError(f"a mixer of kind {self.kind!r} with heads_dim {self.heads_dim} needs heads in that dimension")

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of causal attention by name."""
        return {"window": self.window, "softcap": self.softcap, "scale": self.scale, "sinks": self.sinks}

    @property
    def key_heads(self) -> int | None:
        """Number of key/value heads, or ``None`` if the mixer has no heads."""
        return self.heads if self.kv_heads is None else self.kv_heads


def causal_attention(
    heads: int,
    kv_heads: int | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: bool = False,
) -> Mixer:
    """Return a mixer for causal softmax attention, without its projections. The module is called with ``(q, k, v)``, each
    ``[batch, heads, seq, head_dim]``, and returns a tensor like ``q``, of the width of ``v``. It is a
    :class:`titan_core.api.CausalAttention` with the same options, or a module without parameters that computes the same.

    Args:
        heads: number of query heads.
        kv_heads: number of key/value heads; ``None``: ``heads``.
        window: number of positions that a query sees, its own included; ``None``: all.
        softcap: cap ``c`` of the scores, which become ``c * tanh(score / c)``.
        scale: factor of the scores; ``None``: ``head_dim ** -0.5``.
        sinks: whether the module is also called with ``sinks=``, ``[heads]``, the score of each head's sink.

    Raises:
        ValueError: an option is not positive.
    """
    return Mixer(
        kind=CAUSAL_ATTENTION,
        heads=heads,
        kv_heads=kv_heads,
        sequence_dim=2,
        window=window,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
    )
