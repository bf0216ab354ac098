"""The way of matrices to the rank that computes with them, and of the results back.

A parameter is divided over some dimensions of a mesh, and replicated over others. Each matrix has an *owner*, a rank of that
mesh. In a round, each rank owns a few matrices: shards pass to the owners along one dimension of the mesh after another, by
one all-to-all each, the owners compute, and the shards of the results return the same way. Ranks with replicas of a shard
share the work, too: only the owner's replica sends, and all replicas receive the result. The dimension along which expert
parallelism divides a stack needs no exchange, because the matrices on it are whole.

A rank sends its shard of each matrix once, and as many elements of results; no rank holds more whole matrices than its share
of a round.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_optim.matrices import Matrices


@dataclass(frozen=True)
class Leg:
    """A dimension of a mesh along which matrices are divided or replicated."""

    mesh_dim: int
    dim: int | None
    """What it divides: rows (0) or columns (1); ``None``: ranks hold replicas."""
    ranks: int
    coordinate: int
    """Of this rank."""
    group: dist.ProcessGroup


@dataclass(frozen=True, eq=False)
class Item:
    """One matrix of a parameter."""

    matrices: Matrices
    index: int
    """Its place in this rank's shard of the stack."""
    owner: tuple[int, ...]
    """Coordinate of its owner on each leg."""


Round = list[Item]
"""Matrices that are exchanged together. Equal on all ranks that exchange them."""


class Route:
    """Exchanges the matrices of parameters that are divided in the same way."""

    def __init__(self, example: Matrices) -> None:
        """
        Args:
            example: one of the parameters.
        """
        self.legs = legs_of(example)
        self._shard_shapes: dict[Matrices, list[tuple[list[int], tuple[int, int]]]] = {}

    def rounds(self, parameters: Iterable[Matrices], buffer_bytes: int) -> list[Round]:
        """Divide the matrices of ``parameters`` among owners, and into rounds in which no rank has more than
        ``buffer_bytes`` of them in fp32, neither of whole ones nor of shards; at least one matrix."""
        ranks = math.prod(leg.ranks for leg in self.legs)
        found = [(one, index) for one in parameters for index in range(one.local(one.parameter).shape[0])]
        found.sort(key=lambda item: -_cost(item[0]))
        loads = [(0.0, owner) for owner in range(ranks)]
        rounds: list[Round] = [[]]
        of_owner, of_shards = [0] * ranks, 0.0
        divided = math.prod(leg.ranks for leg in self.legs if leg.dim is not None)
        for matrices, index in found:
            load, owner = heapq.heappop(loads)
            heapq.heappush(loads, (load + _cost(matrices), owner))
            size = 4 * math.prod(matrices.shape)
            if (of_owner[owner] and of_owner[owner] + size > buffer_bytes) or (
                rounds[-1] and of_shards + size / divided > buffer_bytes
            ):
                rounds.append([])
                of_owner, of_shards = [0] * ranks, 0.0
            of_owner[owner] += size
            of_shards += size / divided
            rounds[-1].append(Item(matrices, index, self._coordinates(owner)))
        return [items for items in rounds if items]

    def gather(self, items: Round, shard_of: Callable[[Item], Tensor]) -> dict[Item, Tensor]:
        """Return the matrices of a round that this rank owns, whole.

        Args:
            shard_of: returns this rank's shard of a matrix, ``[rows, columns]``. Called for those that it sends.
        """
        number = next((number for number, leg in enumerate(self.legs) if leg.dim is not None), len(self.legs))
        held = self._held(items, number)
        blocks = {item: shard_of(item) for item in held}
        for leg_number in range(number, len(self.legs)):
            leg = self.legs[leg_number]
            if not held:
                break  # as on all ranks along this leg
            leaving = [[item for item in held if item.owner[leg_number] == rank] for rank in range(leg.ranks)]
            held = leaving[leg.coordinate]
            shapes = [[self._piece(item, leg_number, rank) for item in held] for rank in range(leg.ranks)]
            arrived = _exchanged([[blocks[item] for item in some] for some in leaving], shapes, leg)
            assert leg.dim is not None
            blocks = {
                item: torch.cat([arrived[rank][place] for rank in range(leg.ranks)], dim=leg.dim)
                for place, item in enumerate(held)
            }
        return blocks

    def scatter(self, items: Round, owned: dict[Item, Tensor], like: Tensor) -> dict[Item, Tensor]:
        """Return this rank's shard of all matrices of a round, ``[rows, columns]``.

        Args:
            owned: those that this rank owns, whole.
            like: a tensor of their data type and device.
        """
        blocks = owned
        for number in reversed(range(len(self.legs))):
            leg = self.legs[number]
            held, wanted = self._held(items, number + 1), self._held(items, number)
            if not wanted:
                continue  # as on all ranks along this leg
            pieces = [[self._cut(blocks[item], item, number, rank) for item in held] for rank in range(leg.ranks)]
            senders = [[item for item in wanted if item.owner[number] == rank] for rank in range(leg.ranks)]
            shapes = [[self._piece(item, number, leg.coordinate) for item in some] for some in senders]
            arrived = _exchanged(pieces, shapes, leg, like)
            blocks = {
                item: block
                for some, tensors in zip(senders, arrived, strict=True)
                for item, block in zip(some, tensors, strict=True)
            }
        return blocks

    def _coordinates(self, owner: int) -> tuple[int, ...]:
        found = []
        for leg in reversed(self.legs):
            owner, coordinate = divmod(owner, leg.ranks)
            found.append(coordinate)
        return tuple(reversed(found))

    def _held(self, items: Round, number: int) -> list[Item]:
        """Return the matrices whose owner has this rank's coordinates on the first ``number`` legs."""
        mine = tuple(leg.coordinate for leg in self.legs[:number])
        return [item for item in items if item.owner[:number] == mine]

    def _sizes(self, item: Item) -> list[tuple[list[int], tuple[int, int]]]:
        """Return for each leg the lengths of the pieces that it divides a matrix into, and this rank's shape before that.
        The first leg along which shards are gathered divides last."""
        if item.matrices not in self._shard_shapes:
            shape = list(item.matrices.shape)
            found: list[tuple[list[int], tuple[int, int]]] = []
            for leg in reversed(self.legs):
                before = shape[0], shape[1]
                lengths: list[int] = []
                if leg.dim is not None:
                    lengths = chunk_lengths(shape[leg.dim], leg.ranks)
                    shape[leg.dim] = lengths[leg.coordinate]
                found.append((lengths, before))
            self._shard_shapes[item.matrices] = found[::-1]
        return self._shard_shapes[item.matrices]

    def _piece(self, item: Item, number: int, rank: int) -> tuple[int, int]:
        """Return the shape of the piece that ``rank`` has of what the leg divides."""
        lengths, (rows, columns) = self._sizes(item)[number]
        match self.legs[number].dim:
            case 0:
                return lengths[rank], columns
            case 1:
                return rows, lengths[rank]
        return rows, columns

    def _cut(self, block: Tensor, item: Item, number: int, rank: int) -> Tensor:
        lengths, _ = self._sizes(item)[number]
        dim = self.legs[number].dim
        return block if dim is None else block.narrow(dim, sum(lengths[:rank]), lengths[rank])


def legs_of(matrices: Matrices) -> list[Leg]:
    """Return the legs on the way of a parameter's matrices: first those with replicas, along which nothing is gathered, then
    those that divide them, in the order in which shards are joined."""
    parameter = matrices.parameter
    if not isinstance(parameter, DTensor):
        return []
    mesh, coordinates = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    replicas: list[Leg] = []
    strided: list[Leg] = []
    plain: list[Leg] = []
    for number, placement in enumerate(parameter.placements):
        ranks = mesh.size(number)
        if ranks == 1:
            continue
        if placement.is_replicate():
            replicas.append(Leg(number, None, ranks, coordinates[number], mesh.get_group(number)))
            continue
        dim = placement.dim % parameter.dim()  # type: ignore[attr-defined]
        if dim == matrices.stack:
            continue
        leg = Leg(number, matrices.dims.index(dim), ranks, coordinates[number], mesh.get_group(number))
        # A strided shard, FSDP's of what TP has already divided, is a shard of a later dimension's shard.
        (plain if placement.is_shard() else strided).append(leg)
    return [*replicas, *strided, *reversed(plain)]


def route_key(matrices: Matrices) -> object:
    """Return what parameters have in common whose matrices are exchanged together."""
    legs = tuple((leg.mesh_dim, leg.dim) for leg in legs_of(matrices))
    parameter = matrices.parameter
    return (parameter.device_mesh, parameter.placements, legs) if isinstance(parameter, DTensor) else None


def chunk_lengths(length: int, ranks: int) -> list[int]:
    """Return the lengths of the shards of a dimension, as FSDP and DTensor divide it: the last ones may be empty."""
    chunk = -(-length // ranks)
    return [max(0, min(chunk, length - rank * chunk)) for rank in range(ranks)]


def _cost(matrices: Matrices) -> float:
    return math.prod(matrices.shape) * float(min(matrices.shape))


def _exchanged(
    leaving: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, int]]], leg: Leg, like: Tensor | None = None
) -> list[list[Tensor]]:
    """Send ``leaving[rank]`` to each rank along a leg, and return the tensors of ``shapes[rank]`` from each."""
    flat = [tensor.reshape(-1) for rank, some in enumerate(leaving) for tensor in some if rank != leg.coordinate]
    example = next((tensor for some in leaving for tensor in some), like)
    assert example is not None
    sent = [sum(tensor.numel() for tensor in some) for some in leaving]
    received = [sum(math.prod(shape) for shape in some) for some in shapes]
    sent[leg.coordinate] = received[leg.coordinate] = 0  # stays
    outgoing = torch.cat(flat) if flat else example.new_empty(0)
    incoming = example.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=leg.group)
    found = []
    for rank, (piece, some) in enumerate(zip(incoming.split(received), shapes, strict=True)):
        if rank == leg.coordinate:
            found.append(list(leaving[rank]))
            continue
        tensors = piece.split([math.prod(shape) for shape in some])
        found.append([tensor.view(shape) for tensor, shape in zip(tensors, some, strict=True)])
    return found
