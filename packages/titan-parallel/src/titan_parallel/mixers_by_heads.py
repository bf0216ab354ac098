"""Mixers whose heads are divided over ranks: each computes its share of the heads, with the positions of all of them
(:mod:`titan_parallel.head_exchange`).

Selective recomputation keeps what the collectives return (:data:`~titan_parallel.torch_private.SAVED_OPERATORS`), and does
not communicate again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from titan_core.api import Mixer
from titan_parallel.head_exchange import HeadExchange

_HEADS, _POSITIONS = 1, 2
"""Dimensions of the tensors of causal attention."""

# These return functions, not methods of an object for each module: the compiler compares functions by their code, so that
# one graph serves all blocks.


def attention_by_heads(exchange: HeadExchange, attend_to_heads: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return causal attention of all heads from a rank's positions, which calls ``attend_to_heads`` with its share of the
    heads and the positions of all ranks of ``exchange``."""

    def forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, sinks: Tensor | None = None) -> Tensor:
        q, k, v = exchange.to_heads((q, k, v), _HEADS, _POSITIONS)
        options = {} if sinks is None else {"sinks": exchange.own(sinks)}
        return exchange.to_positions(attend_to_heads(q, k, v, documents, **options), _HEADS, _POSITIONS)

    return forward


def mixer_by_heads(
    exchange: HeadExchange, compute: Callable[..., Tensor], mixer: Mixer, divisor: int
) -> Callable[..., Tensor]:
    """Return the computation of a mixer of another kind, which calls ``compute`` with this rank's share of the heads.

    Args:
        mixer: has ``heads`` and ``heads_dim``.
        divisor: tensor-parallel degree, which may have divided the heads.
    """
    dim, positions_dim = mixer.heads_dim, mixer.sequence_dim
    assert dim is not None and mixer.heads is not None and mixer.key_heads is not None
    of_any_rank = {mixer.heads, mixer.key_heads}
    sizes = of_any_rank | {number // divisor for number in of_any_rank}

    def forward(*arguments: Any, **keywords: Any) -> Tensor:
        given = [*arguments, *keywords.values()]
        positions = given[0].shape[positions_dim]
        exchanged = [one for one in given if isinstance(one, Tensor) and _has_heads(one, positions)]
        received = iter(exchange.to_heads(exchanged, dim, positions_dim))
        own = [next(received) if isinstance(one, Tensor) and _has_heads(one, positions) else _of_heads(one) for one in given]
        count = len(arguments)
        result = compute(*own[:count], **dict(zip(keywords, own[count:], strict=True)))
        return exchange.to_positions(result, dim, positions_dim)

    def _has_heads(tensor: Tensor, positions: int) -> bool:
        shape = tensor.shape
        return len(shape) > max(dim, positions_dim) and shape[positions_dim] == positions and shape[dim] in sizes

    def _of_heads(argument: Any) -> Any:
        """Return this rank's share of an argument with a number for each head, or an argument that all heads share."""
        if not isinstance(argument, Tensor) or not argument.dim() or not argument.is_floating_point():
            return argument
        if argument.dim() == 1 and argument.shape[0] in sizes:
            return exchange.own(argument)
        why = f"a tensor {list(argument.shape)} has no heads in dimension {dim}, so ranks cannot divide the heads"
        raise ValueError(f"a mixer of kind {mixer.kind!r} is called with other tensors than its layout says: {why}")

    return forward
