"""The masks of causal attention that context parallelism divides: made once per microbatch, as those of one device are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan_core.api import Batch, Mixer, SequenceShare
from titan_core.toolkit.models import attention_masks, document_mask, mask_name, uses_block_masks
from titan_parallel.window_attention import halo_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class DividedMasks:
    """Makes the masks of a microbatch (:attr:`~titan_core.api.ModelPart.attention_masks`).

    Args:
        share: the ranks that divide the queries of a head.
        size: context-parallel degree: as often as a rank's tokens fit in whole sequences.
    """

    def __init__(self, share: SequenceShare, size: int) -> None:
        self._share, self._size = share, size

    def __call__(self, batch: Batch, mixers: Iterable[Mixer]) -> dict[str, Tensor | BlockMask]:
        """Return the masks by name.

        Args:
            batch: has the rank's positions.
            mixers: the model's causal attention.
        """
        mixers, length = list(mixers), batch.tokens.shape[1] * self._size
        if self._share.mesh.size() == 1:
            return attention_masks(batch, mixers, length=length)
        columns = self._share.take(torch.arange(length, device=batch.tokens.device)[None], 1)
        near = {mixer.window for mixer in mixers if mixer.window is not None and mixer.window < length}
        far = [mixer for mixer in mixers if mixer.window not in near]
        # Without documents, rings attend, for which scores that are capped need gathered keys instead.
        masks = attention_masks(batch, [mixer for mixer in far if mixer.softcap is not None], columns, length)
        if uses_block_masks(batch.tokens.device):
            for window in sorted(window for window in near if window is not None):
                masks |= self._of_chunks(batch, window, length)
        return masks

    def _of_chunks(self, batch: Batch, window: int, length: int) -> dict[str, Tensor | BlockMask]:
        """Return the masks of attention from each of the rank's chunks to the positions just before it and its own
        (:func:`~titan_parallel.window_attention.attend_within_window`)."""
        chunks = self._share.chunks
        positions = length // sum(map(len, chunks))
        halo = halo_of(chunks, self._share.mesh.get_local_rank(), positions, window)
        documents = batch.tokens.new_zeros(len(batch.tokens), length) if batch.documents is None else batch.documents
        masks = {}
        for chunk, (own, first) in enumerate(zip(self._share.own, halo.first, strict=True)):
            seen = documents[:, first : (own + 1) * positions]
            columns = torch.arange(seen.shape[1] - positions, seen.shape[1], device=seen.device)[None]
            masks[mask_name(window, chunk)] = document_mask(seen, columns, window)
        return masks
