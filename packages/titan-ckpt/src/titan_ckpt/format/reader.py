"""Reading tensors from a checkpoint, whose data is used only after its checksum is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_ckpt.all_ranks import on_all_ranks
from titan_ckpt.format.chunks import local, read_chunk
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.index import located, read_index
from titan_ckpt.format.layout import Piece
from titan_ckpt.format.stored import BrokenCheckpoint, Chunk, Manifest, data_file
from titan_core.api import World
from titan_core.toolkit.optimizers import global_offset


class Reader:
    """Reads one checkpoint."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Read this rank's shards of ``tensors`` in place, each chunk once, one file after another.

        Raises:
            BrokenCheckpoint: a chunk does not match its checksum.
        """
        wanted: list[tuple[int, str, Piece, Tensor, tuple[int, ...]]] = []
        for name, tensor in tensors.items():
            target = local(tensor.detach())
            offset = first_index(tensor)
            for piece in self._manifest.tensors[name].layout.overlapping(offset, target.shape):
                wanted.append((piece.file, name, piece, target, offset))
        wanted.sort(key=lambda entry: entry[:2])
        for number, of_file in groupby(wanted, key=lambda entry: entry[0]):
            file = data_file(number)
            index = read_index(self._folder, file, self._manifest.files[file])
            for _, name, piece, target, offset in of_file:
                self._copy(name, located(index, name, self._manifest.tensors[name], piece), target, offset)

    def _copy(self, name: str, chunk: Chunk, target: Tensor, offset: Sequence[int]) -> None:
        whole = read_chunk(self._folder, name, self._manifest.tensors[name], chunk)
        ours, theirs = [], []
        for at, size, first, length in zip(offset, target.shape, chunk.offset, chunk.shape, strict=True):
            start, stop = max(at, first), min(at + size, first + length)
            ours.append(slice(start - at, stop - at))
            theirs.append(slice(start - first, stop - first))
        target[tuple(ours)].copy_(whole[tuple(theirs)])

    def load_on_all(self, tensors: Mapping[str, Tensor], world: World) -> str:
        """Call :meth:`load` on all ranks. Returns why one of them could not, or ``""``; the same on all."""
        return on_all_ranks(lambda: self.load(tensors), world, (BrokenCheckpoint, OSError))[1]


def first_index(tensor: Tensor) -> tuple[int, ...]:
    """Return the index of the first element of this rank's shard of ``tensor``."""
    return global_offset(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.dim()
