"""Writing a checkpoint: by all ranks of a job, each its pieces, or of weights alone, tensor by tensor, in one process."""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titan_ckpt.format.chunks import bytes_of, local
from titan_ckpt.format.dtypes import dtype_name
from titan_ckpt.format.folder import Folder, write_all
from titan_ckpt.format.index import write_index
from titan_ckpt.format.layout import Layout
from titan_ckpt.format.manifest import write_manifest
from titan_ckpt.format.pieces import Pieces, Placed, described, planned
from titan_ckpt.format.stored import MODEL, UNFINISHED, DataFile, Manifest, StoredTensor, chunk_digest, data_file
from titan_ckpt.format.tokenizer_files import write_files
from titan_core.api.parallel.tree import gather_on_first, portable, values_of_ranks

T = TypeVar("T")
Plan: TypeAlias = Mapping[str, tuple[Placed, Pieces]]
Digest = concurrent.futures.Future[str]
Results: TypeAlias = Sequence[tuple[tuple[Any, Exception | None], list[tuple[int, int]]]]
"""Of ranks: what each has done, or why it could not, and the ranks that have this result."""
_WAITING = 4
"""Number of chunks that may wait for their digests."""


@dataclass(frozen=True)
class _Piece:
    """A piece that this rank writes."""

    name: str
    dtype: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor


class Writer:
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
        self._folder, self._rank, self._tokenizer = folder, rank, tokenizer or {}
        self._step, self._about, self._state = step, about, state
        self._error: Exception | None = None

    def give_up(self, error: Exception) -> None:
        """Make the save fail on all ranks, because this rank cannot take part; a save that waits for another rank, once that
        one answers."""
        self._error = error

    def save(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Write the tensors of all ranks, each piece once. Collective in ``group``, which has all ranks. No rank collects
        the pieces of the others: each derives which it writes, and the first one receives the sizes of their files.

        Raises:
            CheckpointException: a rank failed; on every rank.
        """
        begun, error = _tried(lambda: self._begin(tensors))
        answers = values_of_ranks((begun, error), group)
        _raise(_failures(answers), error)
        descriptions = [(description, spans) for (description, _), spans in answers if description is not None]
        plan: dict[str, tuple[Placed, Pieces]] = {}

        def write() -> tuple[Any, ...] | None:
            plan.update(planned(descriptions))
            file = self._write(plan, tensors)
            return None if file is None else tuple(file)  # which pickles without the name of the class

        written, error = _tried(write)
        results = gather_on_first((written, error), group)
        failures = _failures(results)
        if self._rank == 0 and not failures:
            files = {
                data_file(rank): DataFile(*file)
                for (file, _), spans in results
                if file is not None
                for rank in itertools.chain(*itertools.starmap(range, spans))
            }
            _, error = _tried(lambda: self._commit(plan, files))
            failures = {} if error is None else {0: error}
        if dist.is_initialized():
            box = [failures]
            dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
            failures = box[0]
        _raise(failures, error)

    def _begin(self, tensors: Mapping[str, Tensor]) -> dict[str, Placed]:
        """Make the folder, marked as unfinished, and describe this rank's tensors. No rank writes data before all have."""
        if self._error is not None:
            raise self._error
        self._folder.make()
        if self._rank == 0:
            self._folder.write(UNFINISHED, b"")
        return described(tensors)

    def _write(self, plan: Plan, tensors: Mapping[str, Tensor]) -> DataFile | None:
        """Write this rank's pieces one at a time, each hashed while it is written, and their index. Return the file's sizes,
        if it has a piece."""
        pieces = []
        for name, (placed, of_all) in plan.items():
            if (box := of_all.of_rank(self._rank)) is not None:
                pieces.append(_Piece(name, placed.dtype, *box, local(tensors[name])))
        if not pieces:
            return None
        starts: list[int] = []
        digests: list[str] = []
        num_bytes = 0
        with self._folder.create(data_file(self._rank)) as file, ThreadPoolExecutor(1) as hashing:
            hashed: deque[Digest] = deque()
            for piece in pieces:
                data = bytes_of(piece.tensor)
                hashed.append(hashing.submit(chunk_digest, piece.name, piece.dtype, piece.offset, piece.shape, data))
                write_all(file, data)
                starts.append(num_bytes)
                num_bytes += len(data)
                # A tensor stays in memory until it is hashed, so limit how many wait.
                while len(hashed) > _WAITING:
                    digests.append(hashed.popleft().result())
            digests += [digest.result() for digest in hashed]
            places = zip(starts, digests, strict=True)
            return write_index(file, dict(zip((piece.name for piece in pieces), places, strict=True)), num_bytes)

    def _commit(self, plan: Plan, files: Mapping[str, DataFile]) -> None:
        """Write the manifest, once all ranks have written their data."""
        distinct = {
            id(pieces): (placed, pieces) for placed, pieces in plan.values()
        }  # one of tensors that are sharded alike
        layouts = {key: pieces.layout(placed.shape) for key, (placed, pieces) in distinct.items()}
        tensors = {name: StoredTensor(placed.dtype, layouts[id(pieces)]) for name, (placed, pieces) in plan.items()}
        tokenizer = write_files(self._folder, self._tokenizer)
        if self._folder.is_local:
            self._folder.sync()
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        if self._error is not None:
            raise self._error
        write_manifest(self._folder, Manifest(self._step, created, self._about, self._state, tensors, files, tokenizer))
        self._folder.remove(UNFINISHED)


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of ``work``, or what it raised, which other ranks must learn."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        return None, error if isinstance(error, torch.OutOfMemoryError) else portable(error)


def _failures(results: Results) -> dict[int, Exception]:
    """Return the distinct failures, each of the first rank that has it."""
    return {spans[0][0]: failed for (_, failed), spans in results if failed is not None}


def _raise(failures: Mapping[int, Exception], own: Exception | None) -> None:
    if failures:
        found: dict[int, Any] = {
            rank: (error, traceback.extract_tb(error.__traceback__)) for rank, error in failures.items()
        }
        raise CheckpointException("write", found) from own


@dataclass
class WeightsWriter:
    """Writes whole tensors one after another."""

    _file: IO[bytes]
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    num_bytes: int = 0
    _index: dict[str, tuple[int, str]] = field(default_factory=dict)
    _layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)

    def add(self, parameter: str, tensor: Tensor) -> None:
        """Write the tensor of ``parameter``, a fully qualified name in the model."""
        data = bytes_of(tensor)
        write_all(self._file, data)
        name, dtype, shape = f"{MODEL}.{parameter}", dtype_name(tensor.dtype), tuple(tensor.shape)
        layout = self._layouts.setdefault(shape, Layout(tuple((0, size) for size in shape), (0,)))
        self.stored[name] = StoredTensor(dtype, layout)
        self._index[name] = self.num_bytes, chunk_digest(name, dtype, (0,) * len(shape), shape, data)
        self.num_bytes += len(data)

    def finish(self) -> DataFile:
        """Write the index of the tensors."""
        return write_index(self._file, self._index, self.num_bytes)


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
    with folder.create(data_file(0)) as file:
        yield (writer := WeightsWriter(file))
        files = {data_file(0): writer.finish()}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    hashes = write_files(folder, tokenizer)
    write_manifest(folder, Manifest(step, created, about, {}, writer.stored, files, hashes))
