"""Saving and restoring a checkpoint: Titan's real functions and files on rank 0 and on the last rank; the other ranks have
the same tensors at other places."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.control_plane.exchange import OtherRanks, seeded_generators
from benchmarks.control_plane.table import Row
from titan_ckpt.format import writer as writing
from titan_ckpt.format.catalogue import entry
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import paused_gc
from titan_ckpt.format.reader import Reader
from titan_ckpt.format.stored import NAME, DataFile, data_file
from titan_ckpt.format.writer import Writer
from titan_core.api.parallel.tree import gather_on_first, key_of

WIDTH = 4
"""Elements of each tensor on each rank: tensors are small, because only their number counts here."""


@contextmanager
def _rank(rank: int, ranks: int, tensors: int) -> Iterator[dict[str, Tensor]]:
    """Be ``rank`` of ``ranks``; yields its tensors, each divided among all ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=rank)
        local = torch.zeros(1, WIDTH)
        shape, stride = torch.Size((ranks, WIDTH)), (WIDTH, 1)
        yield {
            f"model.layers.{n}.weight": DTensor.from_local(
                local.clone(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
            for n in range(tensors)
        }
    finally:
        dist.destroy_process_group()


class _Others(OtherRanks):
    """The other ranks of a save: each has what this one has, of its own place."""

    def __init__(self, rank: int, ranks: int, last: DataFile | None = None) -> None:
        """
        Args:
            last: the sizes of the last rank's file.
        """
        super().__init__(rank, ranks)
        self._last = last
        self.written = DataFile(0, 0, "")
        """The sizes of this rank's file."""
        self._gathering = False

    def answer(self, block: range) -> dict[Any, Any]:
        if not self._gathering:
            return super().answer(block)
        own = self.written
        of_ranks = {rank: own._replace(sha256=own.sha256[:-12] + f"{rank:012d}") for rank in block}  # each its own checksum
        if self._last is not None and self.ranks - 1 in block:
            of_ranks[self.ranks - 1] = self._last
        return {key_of(pickle.dumps((tuple(file), None)), whole=True): [rank, rank + 1] for rank, file in of_ranks.items()}

    def gather(self, value: tuple[Any, None], group: None) -> list[tuple[Any, list[tuple[int, int]]]]:
        self._gathering, self.written = True, DataFile(*value[0])
        return gather_on_first(value, group)

    def broadcast_object_list(self, box: list[Any], **_: object) -> None:
        self.count_broadcast(len(pickle.dumps(box[0])))

    def count_broadcast(self, num_bytes: int) -> None:
        """Add a broadcast from rank 0 in a binomial tree, and that of its size."""
        messages = (self.ranks - 1).bit_length() if self.rank == 0 else 1
        self.cost.messages += 2 * messages
        self.cost.num_bytes += messages * (num_bytes + 8)


def _states(ranks: int) -> dict[str, Any]:
    """Return a run's state. The state of the random generators, the same on all ranks, is real; everything else, which does
    not grow with the ranks, is empty."""
    own: dict[str, Any] = {"state": {}, "extra": {}}
    return {
        "step": 1,
        "tokens_seen": 0,
        "tokens_by_dataset": {},
        "lr_scheduler": {},
        "optimizer": {"parameters": {}, "groups": [], "group_of": {}, "own": own},
        "loader": {"stream_of": {}, "shards": {}},
        "mesh": {},
        "generators": [{**seeded_generators(0), "ranks": [0, ranks]}],
        "observers": {},
    }


def checkpoint(ranks: int, tensors: int, collector: bool = False) -> tuple[list[Row], int]:
    """Save and restore a checkpoint of ``tensors`` tensors, each divided among ``ranks`` writers. Returns the rows, and the
    size of the manifest in bytes.

    Args:
        collector: whether Python's garbage collector is on.
    """
    state = _states(ranks)
    with ExitStack() as stack:
        stack.enter_context(nullcontext() if collector else paused_gc())
        folder = Folder(stack.enter_context(tempfile.TemporaryDirectory())) / "step-1"
        last = _Others(ranks - 1, ranks)
        _save(last, folder, tensors, state)
        first = _Others(0, ranks, last.written)
        _save(first, folder, tensors, state)
        saved = Row("e checkpoint: plan, write, commit", ranks, first.cost, last.cost)
        for rank in range(1, ranks - 1):  # of which only the size is read
            with open(f"{folder}/{data_file(rank)}", "wb") as file:
                file.truncate(first.written.num_bytes + first.written.index_bytes)
        size = folder.size(NAME) or 0
        first, last = _Others(0, ranks), _Others(ranks - 1, ranks)
        with first.cost.timed():
            found = entry(folder, 1)
            sent = pickle.dumps([found, None])
        assert found.manifest is not None, found.problem
        with last.cost.timed():
            pickle.loads(sent)
        for others in (first, last):
            others.count_broadcast(len(sent))
        read = Row("e restore: read and broadcast the manifest", ranks, first.cost, last.cost)
        first, last = _Others(0, ranks), _Others(ranks - 1, ranks)
        for others in (first, last):
            _load(others, Reader(folder, found.manifest), tensors)
        return [saved, read, Row("e restore: plan and load", ranks, first.cost, last.cost)], size


def _save(others: _Others, folder: Folder, tensors: int, state: dict[str, Any]) -> None:
    with (
        _rank(others.rank, others.ranks, tensors) as values,
        patch.multiple(writing, dist=others, gather_on_first=others.gather),
    ):
        others.measure(lambda: Writer(folder, others.rank, 1, {}, state).save(values))


def _load(others: _Others, reader: Reader, tensors: int) -> None:
    with _rank(others.rank, others.ranks, tensors) as values, others.cost.timed():
        reader.load(values)
