"""Loading foreign weights into a run's shards. Each rank reads only its own shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titan_ckpt.foreign_files import ForeignFiles, our_rows
from titan_core.api import ForeignTensor


class ForeignReader(StorageReader):
    """Presents each foreign tensor to DCP as one chunk, under the name of this model's parameter."""

    def __init__(self, files: ForeignFiles, tensors: Mapping[str, ForeignTensor]) -> None:
        """
        Args:
            tensors: foreign tensors by the name of the tensor to load into.
        """
        self._files, self._tensors = files, tensors

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the reader keeps no state between loads."""

    def read_metadata(self, *arguments: Any, **keywords: Any) -> Metadata:
        """Return the shapes and dtypes in the files."""
        stored: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            shape = torch.Size(self._files.shape(tensor))
            whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            stored[name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, self._files.dtype(tensor.name))), shape, [whole]
            )
        return Metadata(stored)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *arguments: Any, **keywords: Any) -> None:
        """Do nothing: the coordinator reads like any other rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the rows that contain each item."""
        for item in plan.items:
            tensor = self._tensors[item.storage_index.fqn]
            start, length = item.storage_offsets[0], item.lengths[0]
            rows = our_rows(self._files, tensor, start, start + length)
            sides = zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
            part = rows[(slice(None), *(slice(first, first + size) for first, size in sides))]
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return ``False``: the files are an argument of the constructor, not an id."""
        return False
