"""Every rank derives which rank writes which piece of a tensor: each element once, by a rank that has it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_ckpt.format.layout import Piece, layout_of, number_of_pieces
from titan_ckpt.format.pieces import Pieces, Placed, described, planned

MESHES: dict[str, Any] = {
    "a line": torch.arange(8),
    "a square": torch.arange(8).view(4, 2),
    "a cube": torch.arange(8).view(2, 2, 2),
    "its columns": torch.arange(8).view(4, 2).T.contiguous(),
    "an irregular one": torch.tensor([[0, 3, 1], [7, 2, 5]]),
}


@contextmanager
def rank_of(rank: int, size: int = 8) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def placements(mesh: torch.Tensor, dims: int, chance: random.Random) -> list[Any]:
    return [chance.choice([Replicate(), *map(Shard, range(dims))]) for _ in range(mesh.dim())]


def cases(mesh: torch.Tensor) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    chance = random.Random(mesh.dim())
    found: dict[str, tuple[tuple[int, ...], list[Any]]] = {"scalar": ((), [Replicate()] * mesh.dim())}
    for number in range(25):
        shape = tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 3)))
        found[f"tensor{number}"] = shape, placements(mesh, len(shape), chance)
    if mesh.dim() > 1:  # FSDP of rows that tensor parallelism has cut before
        rows = [Replicate()] * (mesh.dim() - 2) + [_StridedShard(0, split_factor=mesh.shape[-1]), Shard(0)]
        found["strided"] = (mesh.shape[-1] * mesh.shape[-2] * 3, 2), rows
    return found


@pytest.mark.parametrize("kind", MESHES)
def test_each_element_is_written_once_by_a_rank_that_has_it(kind: str) -> None:
    ranks = MESHES[kind]
    descriptions, boxes = [], {}
    for rank in ranks.flatten().tolist():
        with rank_of(rank):
            mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
            tensors = {}
            for name, (shape, places) in cases(ranks).items():
                local = torch.empty(shape)
                for size, place, at in zip(ranks.shape, places, mesh.get_coordinate() or [], strict=True):
                    if type(place) is Shard and name != "strided":
                        chunks = local.chunk(size, place.dim)
                        empty = local.narrow(place.dim, 0, 0)
                        local = chunks[at] if at < len(chunks) else empty
                if name == "strided":
                    local = torch.empty(3, 2)
                tensors[name] = DTensor.from_local(
                    local, mesh, places, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride()
                )
            descriptions.append((described(tensors), [(rank, rank + 1)]))  # compares with torch's own offsets
            boxes[rank] = {name: tuple(tensor.to_local().shape) for name, tensor in tensors.items()}
    assert all(description == descriptions[0][0] for description, _ in descriptions)
    for name, (placed, pieces) in planned(descriptions).items():
        written = torch.zeros(placed.shape)
        assert len(set(pieces.ranks.tolist())) == len(pieces.ranks) > 0
        for rank in pieces.ranks.tolist():
            box = pieces.of_rank(rank)
            assert box is not None and (box[1] == boxes[rank][name] or not prod(placed.shape))
            written[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] += 1
        assert written.eq(1).all(), name
        layout = pieces.layout(placed.shape)
        assert {piece.file: (piece.offset, piece.shape) for piece in layout.pieces()} == {
            rank: pieces.of_rank(rank) for rank in pieces.ranks.tolist()
        }
        again = layout.as_json()
        assert list(layout_of(again["cuts"], again["files"]).pieces()) == list(layout.pieces())
        assert number_of_pieces(again["cuts"], again["files"]) == len(pieces.ranks)


def test_a_reader_finds_the_pieces_that_a_box_overlaps() -> None:
    layout = layout_of(
        [[[0, 3, 3], [8, 0, 1]], [[0, 2, 3], [5, 4, 2]]], [[3, 5, 4], [1, 1, 1], [19, -4, 4], [40, 0, 1], [50, 1, 2]]
    )
    assert layout.shape == (8, 9) and len(list(layout.pieces())) == 12
    for first, rows, second, columns in product(range(9), range(9), range(10), range(10)):
        if first + rows <= 8 and second + columns <= 9 and rows and columns:
            expected = [
                piece for piece in layout.pieces()
                if piece.offset[0] < first + rows and first < piece.offset[0] + piece.shape[0]
                and piece.offset[1] < second + columns and second < piece.offset[1] + piece.shape[1]
            ]  # fmt: skip
            assert list(layout.overlapping((first, second), (rows, columns))) == expected
    assert list(layout.overlapping((8, 0), (0, 9))) == []
    scalar, empty = layout_of([], [[7, 0, 1]]), layout_of([[[0, 0, 2]]], [[7, 0, 1]])
    assert list(scalar.overlapping((), ())) == [Piece(7, (), ())]
    assert list(empty.pieces()) == [Piece(7, (0,), (0,))] and list(empty.overlapping((0,), (0,))) == []


def test_pieces_that_are_no_grid_are_refused() -> None:
    bricks = Pieces(numpy.arange(3), numpy.array([[0, 0], [0, 2], [1, 0]]), numpy.array([[1, 2], [1, 2], [1, 4]]))
    with pytest.raises(RuntimeError, match="not those of a grid"):
        bricks.layout((2, 4))


def test_replicas_share_the_writing() -> None:
    whole = {f"w{number}": Placed("float32", (4, 2)) for number in range(200)}
    plan = planned([(whole, [(0, 2), (5, 7)])])
    writers = [int(pieces.ranks[0]) for _, pieces in plan.values()]
    assert {rank: writers.count(rank) > 25 for rank in (0, 1, 5, 6)} == dict.fromkeys((0, 1, 5, 6), True)
    replicated = {name: Placed("float32", (4, 2), (2, 4), (4, 1), True, (None, (0, 0))) for name in whole}
    plan = planned([(replicated, [(8, 16)])])
    of_first = sum(int(pieces.ranks[0]) < 12 for _, pieces in plan.values())
    assert 50 < of_first < 150
    assert all(sorted(pieces.ranks % 4) == [0, 1, 2, 3] for _, pieces in plan.values())


def test_of_meshes_that_hold_the_same_the_first_writes() -> None:
    sharded = {"w": Placed("float32", (8,), (2,), (4,), True, ((0, 0),))}  # on the columns of a mesh of 2 x 4
    _, pieces = planned([(sharded, [(0, 8)])])["w"]
    assert (pieces.ranks.tolist(), pieces.offsets.tolist(), pieces.shapes.tolist()) == ([0, 4], [[0], [4]], [[4], [4]])


def test_ranks_that_disagree_on_a_tensor_are_refused() -> None:
    with pytest.raises(RuntimeError, match="w has another dtype or shape on another rank"):
        planned([({"w": Placed("float32", (8,))}, [(0, 1)]), ({"w": Placed("float32", (9,))}, [(1, 2)])])


def test_a_plan_for_many_ranks_takes_no_list_of_their_pieces() -> None:
    placed = Placed("float32", (2**20, 8), (2**14, 8), (8, 1), True, ((0, 8), (0, 0)))
    plan = planned([({f"w{number}": placed for number in range(50)}, [(0, 2**17)])])
    _, pieces = plan["w7"]
    assert prod(pieces.ranks.shape) == 2**17
    assert pieces.of_rank(9) == ((2**17 + 8, 0), (8, 8))
