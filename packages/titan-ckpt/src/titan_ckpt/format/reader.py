"""Storage reader for :func:`torch.distributed.checkpoint.load`, which plans the parts of chunks that each rank reads. Data
is used only after its checksum is verified."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titan_ckpt.format.chunks import read_chunk
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.stored import Chunk, Manifest


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


class Reader(PlainReader):
    """Reads one checkpoint."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._chunks = {(name, chunk.offset): chunk for name, tensor in manifest.tensors.items() for chunk in tensor.chunks}

    def read_metadata(self, *arguments: Any, **keywords: Any) -> Metadata:
        """Convert the manifest to DCP's metadata."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, tensor.dtype)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in tensor.chunks],
                )
                for name, tensor in self._manifest.tensors.items()
            }
        )

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the chunks that the plan requires, each once, in the order of their bytes in the files."""
        wanted: dict[Chunk, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self._chunk(item.storage_index), []).append(item)
        for chunk in sorted(wanted, key=lambda chunk: (chunk.file, chunk.start)):
            name = wanted[chunk][0].storage_index.fqn
            whole = read_chunk(self._folder, name, self._manifest.tensors[name], chunk)
            for item in wanted[chunk]:
                box = tuple(
                    slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                target = planner.resolve_tensor(item).detach()
                target.copy_(whole[box])
                planner.commit_tensor(item, target)

    def _chunk(self, index: MetadataIndex) -> Chunk:
        # The plan gives no offset for a tensor that is not sharded.
        offset = tuple(index.offset) if index.offset is not None else (0,) * len(self._manifest.tensors[index.fqn].shape)
        return self._chunks[index.fqn, offset]
