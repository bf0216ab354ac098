"""Reading tensors: from a checkpoint, whose data is used only after its checksum is verified, and a storage reader for
:func:`torch.distributed.checkpoint.load`, which plans what each rank reads of other formats."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titan_ckpt.all_ranks import on_all_ranks
from titan_ckpt.format.chunks import local, read_chunk
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.index import located, read_index
from titan_ckpt.format.layout import Piece
from titan_ckpt.format.stored import BrokenCheckpoint, Chunk, Manifest, data_file
from titan_core.api import World
from titan_core.toolkit.optimizers import global_offset


class PlainReader(StorageReader):
    """A reader by which each rank reads what it needs itself, at once, and without a second look at the plans."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the reader keeps no state between loads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *arguments: Any, **keywords: Any) -> None:
        """Do nothing: the coordinator reads like any other rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Call :meth:`read`."""
        self.read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @abstractmethod
    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read each item of the plan into the tensor that the planner resolves for it."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return ``False``: the source of the data is an argument of the constructor, not an id."""
        return False


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
            offset = global_offset(tensor) if isinstance(tensor, DTensor) else (0,) * target.dim()
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
