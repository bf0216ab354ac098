"""Causal attention over whole sequences, or within the documents packed into them: with a sliding window, capped scores or
attention sinks, as models of the field have them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api.model.attention_mask import attention_mask, mask_name, uses_block_masks
from titan_core.api.model.decoding import current_decoding
from titan_core.api.model.dense_attention import attend_densely, attend_in_bands
from titan_core.api.model.packed_attention import attend_packed, is_packed
from titan_core.api.parallel.microbatch import current_microbatch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class CausalAttention(nn.Module):
    """Causal softmax attention, in which each position attends to earlier positions of its document and to itself. Models
    may use it as a mixer (:class:`~titan_core.api.ModelLayout`), with the same options as in
    :func:`~titan_core.api.causal_attention`.

    It calls ``scaled_dot_product_attention`` or, with documents or options, FlexAttention on CUDA devices (He et al., arXiv
    2412.05496); within documents also variable-length attention (``data.document_attention``). On CPUs, a window is computed
    in bands, whose time and memory grow with window x sequence.

    Args:
        window: number of positions that a query sees, its own included (Beltagy et al., arXiv 2004.05150); ``None``: all.
        softcap: cap ``c`` of the scores, which become ``c * tanh(score / c)`` (Gemma 2, arXiv 2408.00118).
        scale: factor of the scores; ``None``: ``head_dim ** -0.5``.
        sinks: whether each head has a sink, the score of a key that every query sees and that has no value (gpt-oss, arXiv
            2508.10925).

    Raises:
        ValueError: an option is not positive.
    """

    def __init__(
        self, *, window: int | None = None, softcap: float | None = None, scale: float | None = None, sinks: bool = False
    ) -> None:
        super().__init__()
        for name, value in {"window": window, "softcap": softcap, "scale": scale}.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
        self.window, self.softcap, self.scale, self.sinks = window, softcap, scale, sinks

    @property
    def options(self) -> dict[str, Any]:
        """Return the options by name, as :attr:`~titan_core.api.Mixer.options` has them."""
        return {"window": self.window, "softcap": self.softcap, "scale": self.scale, "sinks": self.sinks}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, sinks: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            q: ``[batch, heads, seq, head_dim]``.
            k: like ``q``, with the same number of heads or a divisor of it (grouped-query attention).
            v: like ``k``; its heads may be narrower or wider (DeepSeek-V2, arXiv 2405.04434), and so is the result.
            documents: the document of each position, ``[batch, seq]``; ``None``: one document per sequence.
            sinks: the score of each head's sink, ``[heads]``, if the module has sinks.

        Raises:
            ValueError: ``sinks`` are missing, or the module has none.
        """
        if self.sinks != (sinks is not None):
            raise ValueError("pass sinks exactly if the module was built with sinks = True")
        options = {**self.options, "sinks": sinks}
        decoding = current_decoding()
        if decoding is not None:
            return decoding.attend(self, q, k, v, **options)
        return attend(q, k, v, documents=documents, **options)

    def extra_repr(self) -> str:
        """Return the text for ``print(model)``."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items() if value)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None = None,
    columns: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute the attention of :class:`CausalAttention`, by the mask of the current microbatch if it has one for these
    positions.

    Args:
        q: ``[batch, heads, queries, head_dim]``.
        k: ``[batch, heads, seq, head_dim]``, with as many heads as ``q`` or a divisor of it: the positions that the queries
            may see, in order.
        v: like ``k``.
        documents: document of each of these positions, ``[batch, seq]``.
        columns: index among these positions of each query, ``[batch or 1, queries]``; ``None``: the queries are the last of
            them, in order.
        window: see :class:`CausalAttention`, as for the following.
        softcap: cap of the scores.
        scale: factor of the scores.
        sinks: score of each head's sink, ``[heads]``.
        chunk: which chunk of a rank's positions the queries are, if its masks are made by chunk.
    """
    of_chunk = None if chunk is None else mask_name(window, chunk)
    if window is not None and window >= k.shape[2]:
        window = None
    plain = documents is None and window is None and softcap is None and sinks is None
    if plain and columns is None and q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if window is not None and columns is None and not uses_block_masks(q.device):
        return attend_in_bands(q, k, v, window, documents=documents, softcap=softcap, scale=scale, sinks=sinks)
    microbatch = current_microbatch()
    packed = None if microbatch is None or documents is None else microbatch.packed
    if packed is not None and softcap is None and sinks is None and columns is None and is_packed(packed, q, k):
        return attend_packed(q, k, v, packed, window=window, scale=scale)
    mask = _mask_of_microbatch(q, k, documents, of_chunk or mask_name(window))
    if mask is None:
        mask = attention_mask(q, k, documents=documents, columns=columns, window=window)
    if isinstance(mask, Tensor):
        return attend_densely(q, k, v, mask, softcap=softcap, scale=scale, sinks=sinks)
    return flex_attend(q, k, v, mask, softcap=softcap, scale=scale, sinks=sinks)


def _mask_of_microbatch(q: Tensor, k: Tensor, documents: Tensor | None, name: str) -> Tensor | BlockMask | None:
    microbatch = current_microbatch()
    if microbatch is None or (documents is None) != (microbatch.batch.documents is None):
        return None
    mask = microbatch.masks.get(name)
    return mask if mask is not None and tuple(mask.shape[-2:]) == (q.shape[2], k.shape[2]) else None


def flex_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention by FlexAttention, compiled on CUDA devices; for the arguments see :func:`attend`."""
    from torch.nn.attention.flex_attention import AuxRequest

    flex = _compiled() if q.device.type == "cuda" and not torch.compiler.is_compiling() else _flex_attention()
    options: Any = {"score_mod": None if softcap is None else _capped(softcap), "block_mask": mask, "scale": scale}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    result: Tensor
    if sinks is None:
        result = flex(q, k, v, **options)
        return result
    result, found = flex(q, k, v, **options, return_aux=AuxRequest(lse=True))
    # The sink is one more addend of each query's softmax denominator.
    return result * torch.sigmoid(found.lse - sinks.view(1, -1, 1)).unsqueeze(-1).to(result.dtype)


@cache
def _capped(softcap: float) -> Any:
    """Return one function for each cap: another function would be compiled again."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    """Return the compiled function: without compilation, FlexAttention would materialise all scores."""
    # As one operator, so that selective recomputation can keep its results.
    return torch.compile(_flex_attention(), options={"wrap_inductor_compiled_regions": True})
