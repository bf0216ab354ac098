"""Writing a checkpoint: a storage writer for :func:`torch.distributed.checkpoint.save`, which plans the chunks that each
rank writes, and a writer of weights alone, tensor by tensor, in one process."""

from __future__ import annotations

import concurrent.futures
import datetime
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from titan_ckpt.format.chunks import bytes_of
from titan_ckpt.format.dtypes import dtype_name
from titan_ckpt.format.folder import Folder, write_all
from titan_ckpt.format.manifest import write_manifest
from titan_ckpt.format.stored import MODEL, UNFINISHED, Chunk, Manifest, StoredTensor, chunk_digest
from titan_ckpt.format.tokenizer_files import write_files

Digest = concurrent.futures.Future[str]
_WAITING = 4
"""Number of chunks that may wait for their digests."""
_FILE = "data-00000.bin"


class Writer(StorageWriter):
    """Writes one checkpoint: each rank writes its data file, then the first rank the manifest."""

    def __init__(
        self,
        folder: Folder,
        rank: int,
        step: int,
        about: Mapping[str, Any],
        state: Mapping[str, Any],
        tokenizer: Mapping[str, bytes] | None = None,
    ) -> None:
        """
        Args:
            tokenizer: the files of the tokenizer by name, on the first rank.
        """
        self._folder, self._tokenizer = folder, tokenizer or {}
        self._file = f"data-{rank:05d}.bin"
        self._step, self._about, self._state = step, about, state
        self._error: Exception | None = None
        self._is_coordinator = False

    def give_up(self, error: Exception) -> None:
        """Make the save fail on all ranks, because this rank cannot take part; a save that waits for another rank, once that
        one answers."""
        self._error = error

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: each save has its own writer."""

    def set_up_storage_writer(self, is_coordinator: bool, *arguments: Any, **keywords: Any) -> None:
        """Record whether this rank is the coordinator, which marks the folder as unfinished and writes the manifest."""
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged, and make the folder. DCP calls this on all ranks before any rank writes data."""
        if self._error is not None:
            raise self._error
        self._folder.make()
        if self._is_coordinator:
            self._folder.write(UNFINISHED, b"")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks one at a time, each hashed while it is written."""
        results: list[WriteResult] = []
        if plan.items:
            with self._folder.create(self._file) as file, ThreadPoolExecutor(1) as hashing:
                hashed: deque[tuple[WriteItem, int, int, Digest]] = deque()
                start = 0
                for item in plan.items:
                    assert item.tensor_data is not None, "only tensors reach the writer; other state is in the manifest"
                    data = bytes_of(planner.resolve_data(item))  # type: ignore[arg-type]
                    hashed.append((item, start, len(data), hashing.submit(_digest, item, data)))
                    write_all(file, data)
                    start += len(data)
                    # A tensor stays in memory until it is hashed, so limit how many wait.
                    while len(hashed) > _WAITING:
                        results.append(self._result(*hashed.popleft()))
                results += [self._result(*entry) for entry in hashed]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _result(self, item: WriteItem, start: int, num_bytes: int, sha256: Digest) -> WriteResult:
        assert item.tensor_data is not None
        box = item.tensor_data.chunk
        chunk = Chunk(tuple(box.offsets), tuple(box.sizes), self._file, start, num_bytes, sha256.result())
        return WriteResult(index=item.index, size_in_bytes=num_bytes, storage_data=chunk)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest. DCP calls this on the coordinator once all ranks have written their data."""
        if self._error is not None:
            raise self._error
        chunks: dict[str, list[Chunk]] = {}
        files: dict[str, int] = {}
        for result in (result for rank_results in results for result in rank_results):
            chunk: Chunk = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
            files[chunk.file] = files.get(chunk.file, 0) + chunk.num_bytes
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            dtype = dtype_name(stored.properties.dtype)
            tensors[name] = StoredTensor(dtype, tuple(stored.size), tuple(chunks[name]))
        tokenizer = write_files(self._folder, self._tokenizer)
        if self._folder.is_local:
            self._folder.sync()
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_manifest(self._folder, Manifest(self._step, created, self._about, self._state, tensors, files, tokenizer))
        self._folder.remove(UNFINISHED)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return ``False``: the folder is an argument of the constructor, not an id."""
        return False


def _digest(item: WriteItem, data: memoryview) -> str:
    assert item.tensor_data is not None
    box, dtype = item.tensor_data.chunk, dtype_name(item.tensor_data.properties.dtype)
    return chunk_digest(item.index.fqn, dtype, tuple(box.offsets), tuple(box.sizes), data)


@dataclass
class WeightsWriter:
    """Writes whole tensors one after another."""

    _file: IO[bytes]
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, parameter: str, tensor: Tensor) -> None:
        """Write the tensor of ``parameter``, a fully qualified name in the model."""
        data = bytes_of(tensor)
        write_all(self._file, data)
        name, dtype, shape = f"{MODEL}.{parameter}", dtype_name(tensor.dtype), tuple(tensor.shape)
        begin = (0,) * len(shape)
        chunk = Chunk(begin, shape, _FILE, self.num_bytes, len(data), chunk_digest(name, dtype, begin, shape, data))
        self.stored[name] = StoredTensor(dtype, shape, (chunk,))
        self.num_bytes += len(data)


@contextmanager
def written_weights(
    folder: Folder, step: int, about: Mapping[str, Any], tokenizer: Mapping[str, bytes]
) -> Iterator[WeightsWriter]:
    """Return a writer into ``folder``, which is a checkpoint once the context exits without an error.

    Args:
        step: step of the weights; 0 if unknown.
        about: see :class:`~titan_ckpt.format.stored.Manifest`.
        tokenizer: the files of the tokenizer, by name.
    """
    with folder.create(_FILE) as file:
        yield (writer := WeightsWriter(file))
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    hashes = write_files(folder, tokenizer)
    write_manifest(folder, Manifest(step, created, about, {}, writer.stored, {_FILE: writer.num_bytes}, hashes))
