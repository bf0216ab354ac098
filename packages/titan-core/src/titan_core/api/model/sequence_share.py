"""The positions of each sequence that a rank holds if sequences are sharded, and the exchange of positions between ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


@dataclass(frozen=True)
class SequenceShare:
    """A rank's positions. Each sequence is split into equal chunks, and a rank holds some of them. These need not be
    adjacent in the sequence; the rank holds them contiguously, in the order of :attr:`own`."""

    mesh: DeviceMesh
    """The ranks that share each sequence, in one dimension."""
    chunks: tuple[tuple[int, ...], ...]
    """The chunks that each rank of the mesh holds; the same number on all ranks."""

    @property
    def own(self) -> tuple[int, ...]:
        """The chunks that this rank holds."""
        return self.chunks[self.mesh.get_local_rank()]

    def gather(self, share: Tensor, dim: int) -> Tensor:
        """Return the ``share`` of all ranks in sequence order. The gradient of each rank's share is summed over ranks.

        Args:
            share: this rank's chunks along ``dim``: their positions, or any other number of elements per chunk.
        """
        gathered = DTensor.from_local(share, self.mesh, [Shard(dim)], run_check=False).redistribute(placements=[Replicate()])
        held = list(itertools.chain.from_iterable(self.chunks))
        pieces = gathered.to_local(grad_placements=[Partial()]).chunk(len(held), dim)
        return torch.cat([pieces[held.index(chunk)] for chunk in range(len(held))], dim)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's chunks of ``whole``, which has all positions in order along ``dim``."""
        pieces = whole.chunk(sum(map(len, self.chunks)), dim)
        return torch.cat([pieces[chunk] for chunk in self.own], dim)
