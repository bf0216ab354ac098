"""A model of torch's caching allocator of CUDA memory: what a sequence of allocations and frees makes it reserve.

Free of torch. Source: ``c10/cuda/CUDACachingAllocator.cpp`` and its notes (torch 2.5 to 2.15).

* Sizes are multiples of 512 bytes. Requests of up to 1 MiB come from a small pool, others from a large one, and each stream
  has its own: memory that one stream has freed serves no other.
* A request takes the smallest free block into which it fits, and leaves the rest of it free. Free neighbours are merged.
* Without a block that fits, torch reserves a segment: 2 MiB for the small pool, 20 MiB for requests below 10 MiB, and else
  the request, rounded to 2 MiB. Segments are never merged.
* With *expandable segments*, each pool is one segment that grows in pages, of 2 MiB (small pool) or 20 MiB (large pool).
* When the device is full, torch returns to it what is free: whole segments, or whole pages. It synchronises for that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 2**20
ROUNDING = 512
"""Bytes of which all sizes are multiples."""
SMALL = MIB
"""Largest request that the small pool serves."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
"""Segment of requests below :data:`MIN_OWN_SEGMENT`; page of an expandable segment."""
MIN_OWN_SEGMENT = 10 * MIB
OWN_SEGMENT_ROUNDING = 2 * MIB

_ENDLESS = 2**40 * LARGE_SEGMENT
"""Address space of an expandable segment: more than any device has, in whole pages."""


class OutOfMemory(Exception):
    """The device has no room for a request."""


class Block:
    """A piece of a segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: _Pool, address: int, size: int, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.free = True
        self.previous: Block | None = None
        self.next: Block | None = None


class _Pool:
    """The blocks of one stream, small or large."""

    __slots__ = ("free", "page", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, Block]] = []  # by size, then by address
        self.unmapped: list[tuple[int, Block]] = []  # of an expandable segment, by address

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def forget(self, block: Block) -> None:
        """Remove an unmapped block."""
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """The allocator of one device.

    Args:
        expandable: whether segments are expandable.
        limit: bytes that it may reserve.
    """

    def __init__(self, expandable: bool, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated = self.reserved = 0
        """Bytes in use, rounded, and bytes obtained from the device."""
        self.most_allocated = self.most_reserved = 0
        self.retries = 0
        """How often the device was full, so that free memory was returned to it."""
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._end = 0  # of the last segment; segments do not touch

    def allocate(self, size: int, stream: int) -> Block:
        """Return a block of at least ``size`` bytes (at least one) for a stream.

        Raises:
            OutOfMemory: there is no room, even after all free memory was returned.
        """
        size = -(-size // ROUNDING) * ROUNDING
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = self._new_pool(small)
        block = self._best_fit(pool, size) or self._obtain(pool, size)
        rest = block.size - size
        if rest >= (ROUNDING if small or self.expandable else SMALL + 1):
            self._split(block, size)
            assert block.next is not None
            pool.add(block.next)
        block.free = False
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block that :meth:`allocate` returned."""
        pool = block.pool
        self.allocated -= block.size
        block.free = True
        for other in (block.previous, block.next):
            if other is not None and other.free and other.mapped:
                pool.remove(other)
                _merge(block, other)
        pool.add(block)

    def _new_pool(self, small: bool) -> _Pool:
        pool = _Pool(small)
        if self.expandable:
            everything = Block(pool, self._end, _ENDLESS, mapped=False)
            self._end += 2 * _ENDLESS
            pool.unmapped.append((everything.address, everything))
        return pool

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        free = pool.free
        number = bisect_left(free, (size,))
        if number == len(free):
            return None
        found = free[number][2]
        # What lies before unmapped memory can grow, so it counts as large as it may become.
        while _room(found) > found.size and number + 1 < len(free) and _room(free[number + 1][2]) < _room(found):
            number += 1
            found = free[number][2]
        del free[number]
        return found

    def _obtain(self, pool: _Pool, size: int) -> Block:
        """Reserve memory, and return a block that is in no list."""
        found = self._expand(pool, size) if self.expandable else self._segment(pool, size)
        if found is None:
            self.retries += 1
            self._release()
            found = self._expand(pool, size) if self.expandable else self._segment(pool, size)
        if found is None:
            raise OutOfMemory
        return found

    def _reserve(self, size: int) -> bool:
        if self.limit is not None and self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return True

    def _segment(self, pool: _Pool, size: int) -> Block | None:
        if pool.small:
            whole = SMALL_SEGMENT
        elif size < MIN_OWN_SEGMENT:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // OWN_SEGMENT_ROUNDING) * OWN_SEGMENT_ROUNDING
        if not self._reserve(whole):
            return None
        block = Block(pool, self._end, whole)
        self._end += 2 * whole
        return block

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map memory at the lowest address at which it makes room, beginning with a free block that lies before it."""
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            first = before if before is not None and before.free and before.mapped else unmapped
            room, block = 0, first
            while True:
                room += block.size
                following = block.next
                if room >= size or following is None or not following.free:
                    break
                block = following
            if room >= size:
                break
        else:  # not reached: the end of the address space is never mapped
            return None
        if first.mapped:
            pool.remove(first)
        elif not self._map(first, min(size, first.size)):
            return None
        while first.size < size:
            following = first.next
            assert following is not None
            if following.mapped:
                pool.remove(following)
            elif not self._map(following, min(size - first.size, following.size)):
                pool.add(first)
                return None
            _merge(first, following)
        return first

    def _map(self, block: Block, size: int) -> bool:
        """Map the pages of the first ``size`` bytes of ``block``; the rest becomes a block of its own."""
        pool = block.pool
        whole = min(-(-size // pool.page) * pool.page, block.size)
        if not self._reserve(whole):
            return False
        pool.forget(block)
        block.mapped = True
        if whole < block.size:
            rest = self._split(block, whole)
            rest.mapped = False
            insort(pool.unmapped, (rest.address, rest))
        return True

    def _release(self) -> None:
        """Return to the device all segments, or all pages, that are free."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if not self.expandable:
                    if block.previous is None and block.next is None:
                        pool.remove(block)
                        self.reserved -= block.size
                    continue
                begin = -(-block.address // pool.page) * pool.page
                end = (block.address + block.size) // pool.page * pool.page
                if begin < end:
                    self._unmap(block, begin, end)

    def _unmap(self, block: Block, begin: int, end: int) -> None:
        pool = block.pool
        pool.remove(block)
        if begin > block.address:
            rest = self._split(block, begin - block.address)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(self._split(block, end - block.address))
        block.mapped = False
        self.reserved -= block.size
        for other in (block.previous, block.next):
            if other is not None and not other.mapped:
                pool.forget(other)
                _merge(block, other)
        insort(pool.unmapped, (block.address, block))

    def _split(self, block: Block, size: int) -> Block:
        """Cut ``block`` after ``size`` bytes, and return the rest, which is free and in no list."""
        rest = Block(block.pool, block.address + size, block.size - size, block.mapped)
        block.size = size
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        return rest


def _room(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def _merge(block: Block, other: Block) -> None:
    """Extend ``block`` by its neighbour ``other``."""
    if other is block.previous:
        block.address = other.address
        block.previous = other.previous
        if other.previous is not None:
            other.previous.next = block
    else:
        block.next = other.next
        if other.next is not None:
            other.next.previous = block
    block.size += other.size


@dataclass(frozen=True)
class Reserved:
    """What a replay needed."""

    allocated: int
    """Largest number of bytes in use at a time, rounded."""
    reserved: int
    """Largest number of bytes reserved."""
    retries: int
    """How often the device was full although the request would have fitted."""

    @property
    def idle(self) -> int:
        """Bytes by which it reserved more than it used. What is in use is reserved, so this is never negative."""
        return self.reserved - self.allocated


Event = tuple[int, int, int]
"""An allocation: (its number, bytes, stream); or the end of one: (its number, 0, 0)."""


def replay(events: Iterable[Event], expandable: bool, limit: int | None = None) -> Reserved:
    """Replay allocations and frees in the order in which the host requests them.

    Raises:
        OutOfMemory: they need more than ``limit`` bytes.
    """
    allocator = CachingAllocator(expandable, limit)
    allocate, free = allocator.allocate, allocator.free
    blocks: dict[int, Block] = {}
    for number, size, stream in events:
        if size:
            blocks[number] = allocate(size, stream)
        else:
            free(blocks.pop(number))
    return Reserved(allocator.most_allocated, allocator.most_reserved, allocator.retries)
