"""Attention of a rank's chunks of a sequence over the keys and values of all ranks, gathered. Exact, on any backend; the
gathered keys and values of one layer at a time are the price (arXiv 2407.21783, section 3.3.2, trains so)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan_core.api.attention import seen


class GatheredAttention:
    """Causal attention where rank ``r`` of the mesh's ``n`` holds chunks ``r`` and ``2 n - 1 - r`` of each sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._chunks = (mesh.get_local_rank(), 2 * mesh.size() - 1 - mesh.get_local_rank())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """As a model's mixer: ``[batch, heads, seq / n, head_dim]`` each, keys and values of fewer heads or as many; the
        documents are those of the whole sequence, ``[batch, seq]``."""
        # One collective for both; backward, each rank's part of their gradients is summed.
        shares = DTensor.from_local(torch.cat((k, v), dim=1), self._mesh, [Shard(2)], run_check=False)
        gathered = shares.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        keys, values = _in_order(gathered, chunk=q.shape[2] // 2).chunk(2, dim=1)
        halves = zip(q.chunk(2, dim=2), self._chunks, strict=True)
        return torch.cat([_attend(half, keys, values, chunk, documents) for half, chunk in halves], dim=2)


def _in_order(gathered: Tensor, chunk: int) -> Tensor:
    """Chunks in the order of ranks (0, 2n - 1, 1, 2n - 2, ...) to their order in the sequence, along dimension 2."""
    pairs = gathered.unflatten(2, (-1, 2, chunk))
    heads, tails = pairs.unbind(3)
    return torch.cat((heads, tails.flip(2)), dim=2).flatten(2, 3)


def _attend(q: Tensor, keys: Tensor, values: Tensor, chunk: int, documents: Tensor | None) -> Tensor:
    """The queries of the ``chunk``-th chunk over all positions up to their own."""
    length = q.shape[2]
    first, end = chunk * length, (chunk + 1) * length
    keys, values, grouped = keys[:, :, :end], values[:, :, :end], q.shape[1] != keys.shape[1]
    if documents is not None:
        mask = seen(documents[:, first:end], documents[:, :end], first)
    elif chunk == 0:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=grouped)
    else:
        mask = torch.ones(length, end, dtype=torch.bool, device=q.device).tril(first)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
