"""Saving and restoring a checkpoint: torch's real ``save`` and ``load`` and Titan's real files on rank 0 and on the last
rank; the plans and results of the others are those of rank 0 with other offsets."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.control_plane.exchange import seeded_generators
from benchmarks.control_plane.table import Cost, Row
from titan_ckpt.format.catalogue import entry
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import paused_gc
from titan_ckpt.format.reader import Reader
from titan_ckpt.format.stored import NAME, Chunk, chunk_digest
from titan_ckpt.format.writer import Writer

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


@dataclass
class _Wire:
    """What ranks have sent, and the cost of this one."""

    rank: int
    ranks: int
    cost: Cost = field(default_factory=Cost)
    serving: float = 0.0
    plan: bytes = b""
    """The plan that rank 0 sends to the last rank."""
    result: bytes = b""
    """What rank 0 sends to all ranks at the end."""

    @contextmanager
    def serve(self) -> Iterator[None]:
        """Time in here is not the rank's."""
        started = time.thread_time()
        yield
        self.serving += time.thread_time() - started

    def count(self, messages: int, num_bytes: int) -> None:
        """Add messages of ``num_bytes`` each."""
        self.cost.messages += messages
        self.cost.num_bytes += messages * num_bytes

    def count_broadcast(self, num_bytes: int) -> None:
        """Add a broadcast from rank 0 in a binomial tree, and that of its size."""
        messages = (self.ranks - 1).bit_length() if self.rank == 0 else 1
        self.count(messages, num_bytes + 8)
        self.cost.messages += messages

    def count_gather(self, num_bytes: int) -> None:
        """Add an all-gather of sizes in a ring, and a gather at rank 0 of equally long messages."""
        self.count(2 * (self.ranks - 1), 8)
        self.count(self.ranks - 1 if self.rank == 0 else 1, num_bytes)


def _wrapper(wire: _Wire) -> type[_DistWrapper]:
    """Return torch's class with the collectives of objects replaced: it pickles what it would send, and unpickles what
    others would have sent."""

    class Wrapper(_DistWrapper):
        def gather_object(self, object: Any) -> list[Any] | None:
            own = pickle.dumps(object)
            if wire.rank != 0:
                wire.count_gather(len(own))
                return None
            with wire.serve():
                sent = [own, *(pickle.dumps(_of_rank(object, rank, wire.ranks)) for rank in range(1, wire.ranks))]
            wire.count_gather(max(map(len, sent)))
            return [pickle.loads(one) for one in sent]

        def scatter_object(self, object_list: list[Any] | None) -> Any:
            if wire.rank != 0:
                wire.count(3, len(wire.plan))
                return pickle.loads(wire.plan)
            assert object_list is not None
            sent = [pickle.dumps(one) for one in object_list]
            wire.plan = sent[-1]
            wire.count_broadcast(0)
            wire.count(wire.ranks - 1, max(map(len, sent)) + 8)
            return pickle.loads(sent[0])

        def broadcast_object(self, object: Any) -> Any:
            if wire.rank == 0:
                wire.result = pickle.dumps(object)
            wire.count_broadcast(len(wire.result))
            return pickle.loads(wire.result) if wire.rank != 0 else object

        def all_gather_object(self, object: Any) -> list[Any]:
            own = pickle.dumps(object)
            wire.count(2 * (wire.ranks - 1), len(own) + 8)
            return [pickle.loads(own) for _ in range(wire.ranks)]

    return Wrapper


def _of_rank(value: Any, rank: int, ranks: int) -> Any:
    """Return what ``rank`` sends where rank 0 sends ``value``."""
    if isinstance(value, SavePlan):
        items = []
        for item in value.items:
            assert item.tensor_data is not None
            offset = torch.Size((rank, 0))
            box = replace(item.tensor_data.chunk, offsets=offset)
            data = replace(item.tensor_data, chunk=box)
            items.append(replace(item, index=replace(item.index, offset=offset), tensor_data=data))
        return replace(value, items=items)
    if isinstance(value, LoadPlan):
        items = [
            replace(
                item,
                dest_index=replace(item.dest_index, offset=torch.Size((rank, 0))),
                storage_index=replace(item.storage_index, offset=torch.Size((rank, 0)), index=rank),
            )
            for item in value.items
        ]
        return replace(value, items=items)
    assert isinstance(value, list), value
    zeros = bytes(WIDTH * 4)
    return [_result(result, rank, zeros) for result in value]


def _result(result: WriteResult, rank: int, data: bytes) -> WriteResult:
    chunk: Chunk = result.storage_data
    offset = (rank, 0)
    digest = chunk_digest(result.index.fqn, "float32", offset, chunk.shape, data)
    moved = replace(chunk, offset=offset, file=f"data-{rank:05d}.bin", sha256=digest)
    return replace(result, index=replace(result.index, offset=torch.Size(offset)), storage_data=moved)


def _states(ranks: int) -> dict[str, Any]:
    """Return a run's state. The states of the ranks' random generators are real; everything else, which does not grow with
    the ranks, is empty."""
    own: dict[str, Any] = {"state": {}, "extra": {}}
    return {
        "step": 1,
        "tokens_seen": 0,
        "tokens_by_dataset": {},
        "lr_scheduler": {},
        "optimizer": {"parameters": {}, "groups": [], "group_of": {}, "own": own},
        "loader": {"stream_of": {}, "shards": {}},
        "mesh": {},
        "generators": seeded_generators(ranks),
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
        first, last = _Wire(0, ranks), _Wire(ranks - 1, ranks)
        for wire in (first, last):
            wire.plan, wire.result = first.plan, first.result
            _save(wire, folder, tensors, state)
        saved = Row("e checkpoint: plan, write, commit", ranks, first.cost, last.cost)
        for rank in range(1, ranks - 1):
            _data_file(folder, rank, tensors)
        size = folder.size(NAME) or 0
        first, last = _Wire(0, ranks), _Wire(ranks - 1, ranks)
        with first.cost.timed():
            found = entry(folder, 1)
            sent = pickle.dumps([found, None])
        assert found.manifest is not None, found.problem
        with last.cost.timed():
            pickle.loads(sent)
        for wire in (first, last):
            wire.count_broadcast(len(sent))
        read = Row("e restore: read and broadcast the manifest", ranks, first.cost, last.cost)
        first, last = _Wire(0, ranks), _Wire(ranks - 1, ranks)
        for wire in (first, last):
            wire.plan = first.plan
            _load(wire, Reader(folder, found.manifest), tensors)
        return [saved, read, Row("e restore: plan and load", ranks, first.cost, last.cost)], size


def _data_file(folder: Folder, rank: int, tensors: int) -> None:
    with folder.create(f"data-{rank:05d}.bin") as file:
        file.write(bytes(tensors * WIDTH * 4))


def _run(wire: _Wire, work: Callable[[], object]) -> None:
    with wire.cost.timed():
        work()
    wire.cost.seconds -= wire.serving


def _save(wire: _Wire, folder: Folder, tensors: int, state: dict[str, Any]) -> None:
    with _rank(wire.rank, wire.ranks, tensors) as values, patch.object(state_dict_saver, "_DistWrapper", _wrapper(wire)):
        writer = Writer(folder, wire.rank, 1, {}, state)
        _run(wire, lambda: state_dict_saver.save(dict(values), storage_writer=writer))


def _load(wire: _Wire, reader: Reader, tensors: int) -> None:
    with _rank(wire.rank, wire.ranks, tensors) as values, patch.object(state_dict_loader, "_DistWrapper", _wrapper(wire)):
        _run(wire, lambda: state_dict_loader.load(dict(values), storage_reader=reader))
