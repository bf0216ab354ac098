"""What a layout says of single parameters and modules: how they may be divided, and what mixes positions. Free of torch.

The rules of tensor parallelism follow Megatron-LM (Shoeybi et al., arXiv 1909.08053). Inside a *region* each rank computes
a share of the features. A layer that opens a region takes whole inputs and gives a share of its outputs (``Column``, or
``Shard`` for a parameter of any other module); one that closes it takes a share and gives a sum over ranks (``Row``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from titan_core.api.ref import Ref


@dataclass(frozen=True)
class Column:
    """Weight or bias of an ``nn.Linear`` that is divided by output features, which are used feature by feature, or head by
    head."""


@dataclass(frozen=True)
class Row:
    """Weight or bias of an ``nn.Linear`` that is divided by input features, the outputs of what is divided before it."""


@dataclass(frozen=True)
class Shard:
    """A parameter of any module, divided along ``dim``, which runs over the divided features of its region. The module
    computes with this rank's share, a plain tensor, as it computes with a whole parameter."""

    dim: int
    """0, 1, ...; -1 is the last one."""


@dataclass(frozen=True)
class Replicate:
    """A parameter that is whole on each rank that computes with it. Outside of regions its module treats each position by
    itself (a norm), and sees this rank's positions."""


@dataclass(frozen=True)
class Experts:
    """A parameter that holds one expert's weights at each index of ``dim``. Expert parallelism gives each rank some of the
    experts: it calls their module with fewer of them.

    The module that owns the parameter owns no others, and is called with ``(rows, counts)``: ``rows``, ``[rows, dim]``, has
    the rows of the first expert first, and ``counts``, int64 ``[experts]``, is how many each has. It returns the like of
    ``rows``, each computed by its expert alone."""

    dim: int = 0
    within: Shard | Replicate = Replicate()
    """How tensor parallelism may divide each expert (``dim`` of it counted in the whole parameter)."""


Rule = Column | Row | Shard | Replicate | Experts
"""How a parameter may be divided."""

CAUSAL_ATTENTION: Final = "causal_attention"
"""The kind of mixers that compute causal softmax attention."""


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """What a module computes that mixes positions."""

    kind: str
    """What it computes. :data:`CAUSAL_ATTENTION` (made by :func:`causal_attention`), or a name of the model's own:
    ``"gated_recurrence"``, for example."""
    heads: int | None = None
    """Heads, where it has any; tensor parallelism divides them."""
    kv_heads: int | None = None
    """Key/value heads, where there are fewer (grouped-query attention); ``None``: as many as ``heads``."""
    sequence_dim: int = 1
    """The dimension of positions in the tensors that it is called with and in the one that it returns."""
    divided: Ref[Callable[..., Any]] | None = None
    """For kinds of the model's own, how to compute it where each rank has some of the positions: ``(module, share)`` -> a
    forward function in place of the module's, which takes and returns tensors of this rank's positions. ``share`` is a
    :class:`~titan_core.api.sequence_share.SequenceShare`. ``None``: only whole sequences."""

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("a mixer's kind must not be empty")
        if self.heads is None and (self.kv_heads is not None or self.kind == CAUSAL_ATTENTION):
            raise ValueError(f"a mixer of kind {self.kind!r} with kv_heads {self.kv_heads} needs heads")

    @property
    def key_heads(self) -> int | None:
        """Key/value heads, or ``None`` where it has no heads."""
        return self.heads if self.kv_heads is None else self.kv_heads


def causal_attention(heads: int, kv_heads: int | None = None) -> Mixer:
    """Causal softmax attention with the scale ``head_dim ** -0.5``, without its projections: a module called with
    ``(q, k, v)``, each ``[batch, heads, seq, head_dim]``, that returns the like of ``q``
    (:class:`titan_core.api.attention.CausalAttention` is one).

    Args:
        heads: query heads.
        kv_heads: key/value heads; ``None``: as many.
    """
    return Mixer(kind=CAUSAL_ATTENTION, heads=heads, kv_heads=kv_heads, sequence_dim=2)
