"""Collectives of small host values over a binomial tree of depth log2(N), where gloo's own pass around a ring of N ranks.

The parent of a rank is the rank without its lowest bit. A rank adds what its children know, passes the sum to its parent,
and the result, which its parent returns, to its children. So N ranks make N - 1 connections, each after a look-up in their
store.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

LONGEST_RING = 32
"""Most ranks whose sums pass around gloo's ring. Its 62 hops run without Python, while each step in a tree takes the GIL,
which the thread that trains needs too."""
GATHERED_TAG = 1
"""Tag of the messages with objects. Sums have tags from ``FIRST_SUM_TAG`` on."""
FIRST_SUM_TAG = 2
_FIRST_BYTES = 512
"""Size of an object's first message. A longer object has a second one."""
_LONGEST_KEY = 64
"""Bytes of a pickled value that travels itself, not its digest."""
Spans = dict[bytes, list[int]]
"""The ranks that have each value, ``[start, stop, start, stop, ...]``."""


def relatives(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Return the parent of ``rank``, and its children, those with few descendants first."""
    bits = [1 << number for number in range((size - 1).bit_length())]
    children = [rank | bit for bit in bits if (rank == 0 or bit < rank & -rank) and rank | bit < size]
    return (rank & (rank - 1) if rank else None), children


def reduce_over_tree(
    tensor: Tensor, combine: Callable[[Tensor, Tensor], Tensor], group: dist.ProcessGroup | None = None, tag: int = 0
) -> None:
    """Combine the ``tensor`` on the CPU of all ranks in place. The result is bitwise the same on all ranks.

    Args:
        tensor: of any strides.
        combine: a commutative function of two ranks' tensors, such as ``torch.add``.
        tag: differs from that of every other exchange of the group that is under way.
    """
    parent, children = relatives(*place(group))
    combined = tensor.contiguous()  # gloo sends no other tensors
    received = torch.empty_like(combined)
    for child in children:
        dist.recv(received, group=group, group_src=child, tag=tag)
        combined.copy_(combine(combined, received))
    if parent is not None:
        dist.send(combined, group=group, group_dst=parent, tag=tag)
        dist.recv(combined, group=group, group_src=parent, tag=tag)
    for work in [dist.isend(combined, group=group, group_dst=child, tag=tag) for child in reversed(children)]:
        assert work is not None
        work.wait()
    if combined is not tensor:
        tensor.copy_(combined)


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a thread that the process does not wait for when it ends (it would, for those of an executor)."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def gather_objects(value: T) -> list[T]:
    """Return the ``value`` of every rank, in rank order; equal values are one object, which must not be changed."""
    values: list[Any] = [value] * dist.get_world_size()
    for one, spans in values_of_ranks(value):
        for start, stop in spans:
            values[start:stop] = [one] * (stop - start)
    return values


def values_of_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[tuple[T, list[tuple[int, int]]]]:
    """Return the distinct values of all ranks, and the ranges ``(start, stop)`` of the ranks that have each, by the first of
    them. A process without a group is rank 0 of 1.

    Ranks exchange digests, and the values only if they differ: most are the same on most ranks.
    """
    rank, size = place(group)
    own = pickle.dumps(value)
    key = key_of(own)
    found = merged({key: [rank, rank + 1]}, rank, size, group)
    if len(found) > 1 and any(other[:1] == b"d" for other in found):
        key = key_of(own, whole=True)
        found = merged({key: [rank, rank + 1]}, rank, size, group)
    return _values(found, {key: value})


def gather_on_first(value: T, group: dist.ProcessGroup | None = None) -> list[tuple[T, list[tuple[int, int]]]]:
    """Return on the first rank what :func:`values_of_ranks` does, and nothing on the others."""
    rank, size = place(group)
    parent, children = relatives(rank, size)
    key = key_of(pickle.dumps(value), whole=True)
    found = {key: [rank, rank + 1]}
    for child in children:
        join(found, receive(child, group))
    if parent is None:
        return _values(found, {key: value})
    send(found, [parent], group)
    return []


def _values(found: Spans, own: dict[bytes, T]) -> list[tuple[T, list[tuple[int, int]]]]:
    """Return the values that ``found`` has whole, by the first rank of each. The ``own`` one stays the same object."""
    return [
        (own[key] if key in own else pickle.loads(key[1:]), list(zip(spans[::2], spans[1::2], strict=True)))
        for key, spans in sorted(found.items(), key=lambda entry: entry[1][0])
    ]


def portable(error: Exception) -> Exception:
    """Return ``error`` if every rank can unpickle it, or one of Python's own that shows it."""
    if not isinstance(error, OSError | MemoryError):
        return RuntimeError(repr(error))
    # Those of libraries, such as urllib's HTTPError, need arguments that pickle does not keep.
    return error if type(error).__module__ == "builtins" else OSError(f"{type(error).__name__}: {error}")


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in ``group``, and the size of the group."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def key_of(pickled: bytes, whole: bool = False) -> bytes:
    """Return ``v`` and the pickled value if it is short or the ``whole`` is wanted, and otherwise ``d`` and its digest."""
    short = whole or len(pickled) <= _LONGEST_KEY
    return b"v" + pickled if short else b"d" + hashlib.sha256(pickled).digest()


def merged(own: Spans, rank: int, size: int, group: dist.ProcessGroup | None = None) -> Spans:
    """Return which ranks have which value. All ranks must call it, each with its own."""
    parent, children = relatives(rank, size)
    for child in children:
        join(own, receive(child, group))
    if parent is not None:
        send(own, [parent], group)
        own = receive(parent, group)
    send(own, children[::-1], group)
    return own


def join(into: Spans, more: Mapping[bytes, list[int]]) -> None:
    """Add the ranks of ``more``."""
    for key, spans in more.items():
        known = into.get(key)
        if known is None:
            into[key] = spans
            continue
        joined: list[int] = []
        both = known + spans
        for start, stop in sorted(zip(both[::2], both[1::2], strict=True)):
            if joined and start <= joined[-1]:
                joined[-1] = max(stop, joined[-1])
            else:
                joined += start, stop
        into[key] = joined


def send(found: dict[Any, Any], peers: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Send ``found`` to the ranks ``peers``."""
    messages = messages_of(found) if peers else []
    for work in [
        dist.isend(message, group=group, group_dst=peer, tag=GATHERED_TAG) for peer in peers for message in messages
    ]:
        assert work is not None
        work.wait()


def receive(peer: int, group: dist.ProcessGroup | None) -> dict[Any, Any]:
    """Return what ``peer`` sends."""
    first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
    dist.recv(first, group=group, group_src=peer, tag=GATHERED_TAG)
    received = first.numpy().tobytes()
    size = int.from_bytes(received[:8])
    if (more := size - (_FIRST_BYTES - 8)) > 0:
        rest = torch.empty(more, dtype=torch.uint8)
        dist.recv(rest, group=group, group_src=peer, tag=GATHERED_TAG)
        received += rest.numpy().tobytes()
    found: dict[Any, Any] = pickle.loads(received[8 : 8 + size])
    return found


def messages_of(sent: dict[Any, Any]) -> list[Tensor]:
    """Return the one or two messages that transfer ``sent``."""
    data = pickle.dumps(sent)
    framed = bytearray(len(data).to_bytes(8) + data).ljust(_FIRST_BYTES, b"\0")
    parts = framed[:_FIRST_BYTES], framed[_FIRST_BYTES:]
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts if part]
