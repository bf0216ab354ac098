"""How chunks of tensors get to files: the storage below :func:`torch.distributed.checkpoint.save`, which decides who writes
what."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from titan_ckpt.folder import Folder
from titan_ckpt.manifest import Chunk, Manifest, StoredTensor, write_manifest


class Writer(StorageWriter):
    """Writes one checkpoint: each rank its file, then the first rank the manifest that makes it one."""

    def __init__(self, folder: Folder, rank: int, step: int, about: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        self._folder = folder
        self._file = f"data-{rank:05d}.bin"
        self._step, self._about, self._state = step, about, state

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from a save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *arguments: Any, **keywords: Any) -> None:
        """All ranks are alike until the end."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        self._folder.make()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, one at a time, each hashed while it is written."""
        results: list[WriteResult] = []
        if plan.items:
            with self._folder.create(self._file) as file, ThreadPoolExecutor(1) as hashing:
                start = 0
                for item in plan.items:
                    assert item.tensor_data is not None, "all that is no tensor goes into the manifest"
                    data = _bytes(planner.resolve_data(item))
                    digest = hashing.submit(hashlib.sha256, data)
                    written = 0
                    while written < len(data):
                        written += file.write(data[written:])
                    box = item.tensor_data.chunk
                    chunk = Chunk(
                        offset=tuple(box.offsets),
                        shape=tuple(box.sizes),
                        file=self._file,
                        start=start,
                        num_bytes=len(data),
                        sha256=digest.result().hexdigest(),
                    )
                    results.append(WriteResult(index=item.index, size_in_bytes=len(data), storage_data=chunk))
                    start += len(data)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written: commit."""
        chunks: dict[str, list[Chunk]] = {}
        files: dict[str, int] = {}
        for result in (one for of_rank in results for one in of_rank):
            chunk: Chunk = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
            files[chunk.file] = files.get(chunk.file, 0) + chunk.num_bytes
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = StoredTensor(dtype, tuple(stored.size), tuple(chunks[name]))
        if self._folder.is_local:
            self._folder.sync()
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_manifest(self._folder, Manifest(self._step, created, self._about, self._state, tensors, files))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """The folder is given when it is made, not as an id."""
        return False


def _bytes(data: Any) -> memoryview:
    """The tensor's bytes, in row-major order."""
    assert isinstance(data, Tensor)
    flat = data.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
