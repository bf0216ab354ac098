"""The model of torch's caching allocator, against cases computed by hand from its source."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("titan_simulate")

from titan_simulate.engine.allocator import MIB, ROUNDING, Block, CachingAllocator, Event, OutOfMemory, replay

MAIN, OTHER = 0, 1


def mib(allocator: CachingAllocator) -> tuple[float, float]:
    return allocator.allocated / MIB, allocator.reserved / MIB


def test_sizes_are_rounded_and_small_ones_share_a_segment() -> None:
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.allocate(size, MAIN) for size in (1, 513, MIB)]
    assert [block.size for block in blocks] == [512, 1024, MIB]
    assert allocator.reserved == 2 * MIB


@pytest.mark.parametrize(
    ("request_mib", "reserved"), [(1.5, 20), (9.9, 20), (10, 10), (10.5, 12), (33, 34)], ids=lambda value: str(value)
)
def test_large_segments(request_mib: float, reserved: int) -> None:
    allocator = CachingAllocator(expandable=False)
    allocator.allocate(int(request_mib * MIB), MAIN)
    assert allocator.reserved == reserved * MIB


def test_the_smallest_block_that_fits_is_used_and_its_rest_stays_free() -> None:
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.allocate(size * MIB, MAIN) for size in (100, 40, 60)]
    for block in blocks:
        allocator.free(block)
    places = [block.address for block in blocks]
    fifty = allocator.allocate(50 * MIB, MAIN)  # in the segment of 60
    allocator.allocate(10 * MIB, MAIN)  # in its rest
    forty = allocator.allocate(38 * MIB, MAIN)
    assert mib(allocator) == (98, 200)
    assert (forty.address, fifty.address) == (places[1], places[2])


def test_a_rest_of_a_mebibyte_or_less_is_not_split_off() -> None:
    allocator = CachingAllocator(expandable=False)
    allocator.free(allocator.allocate(40 * MIB, MAIN))
    assert allocator.allocate(39 * MIB, MAIN).size == 40 * MIB


def test_neighbours_merge_but_segments_do_not() -> None:
    allocator = CachingAllocator(expandable=False)
    halves = [allocator.allocate(8 * MIB, MAIN) for _ in range(2)]  # in a segment of 20
    alone = [allocator.allocate(20 * MIB, MAIN) for _ in range(2)]  # a segment each
    for block in (*halves, *alone):
        allocator.free(block)
    allocator.allocate(20 * MIB, MAIN)
    assert allocator.reserved == 60 * MIB
    allocator.allocate(40 * MIB, MAIN)
    assert allocator.reserved == 100 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_of_one_stream_serves_no_other(expandable: bool) -> None:
    allocator = CachingAllocator(expandable)
    allocator.free(allocator.allocate(100 * MIB, MAIN))
    allocator.allocate(100 * MIB, OTHER)
    assert mib(allocator) == (100, 200)


def test_expandable_segments_grow_in_pages_and_have_no_borders() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.allocate(30 * MIB, MAIN) for _ in range(2)]
    assert mib(allocator) == (60, 60)  # 40, of which 10 are free, and another page
    for block in blocks:
        allocator.free(block)
    allocator.allocate(60 * MIB, MAIN)
    assert mib(allocator) == (60, 60)
    allocator.allocate(1000, MAIN)
    assert allocator.reserved == 62 * MIB


def test_what_can_grow_is_used_last() -> None:
    allocator = CachingAllocator(expandable=True)
    hole, _, end = (allocator.allocate(size * MIB, MAIN) for size in (50, 40, 30))
    place = hole.address
    allocator.free(hole)
    allocator.free(end)  # 30 MiB before the end: fits better, but can grow
    assert allocator.allocate(25 * MIB, MAIN).address == place


def test_a_full_device_takes_back_what_is_free() -> None:
    for expandable, reserved in ((False, 80), (True, 80)):
        allocator = CachingAllocator(expandable, limit=100 * MIB)
        kept, freed = allocator.allocate(20 * MIB, MAIN), allocator.allocate(60 * MIB, MAIN)
        allocator.free(freed)
        allocator.allocate(60 * MIB, OTHER)
        assert (allocator.reserved, allocator.retries) == (reserved * MIB, 1)
        assert kept.size == 20 * MIB and allocator.most_reserved <= 100 * MIB
        with pytest.raises(OutOfMemory):
            allocator.allocate(40 * MIB, OTHER)


def test_pages_in_use_are_not_returned_and_gaps_are_filled_again() -> None:
    allocator = CachingAllocator(expandable=True, limit=100 * MIB)
    blocks = [allocator.allocate(10 * MIB, MAIN) for _ in range(8)]
    places = [block.address for block in blocks]
    for block in (*blocks[:3], blocks[5]):
        allocator.free(block)
    other = allocator.allocate(40 * MIB, OTHER)  # needs the first page back; half of the second and the third is in use
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 1)
    holes = {allocator.allocate(10 * MIB, MAIN).address for _ in range(2)}
    assert holes == {places[2], places[5]}
    allocator.free(other)
    assert allocator.allocate(10 * MIB, MAIN).address == places[0]
    assert allocator.retries == 2


events = st.lists(
    st.tuples(st.integers(0, 30), st.one_of(st.integers(1, 3 * MIB), st.integers(1, 90 * MIB)), st.integers(0, 2)),
    max_size=60,
)


@given(events, st.booleans(), st.booleans())
@settings(max_examples=120, deadline=None)
def test_blocks_never_overlap_and_reserved_covers_them(
    steps: list[tuple[int, int, int]], expandable: bool, limited: bool
) -> None:
    allocator = CachingAllocator(expandable, limit=600 * MIB if limited else None)
    held: dict[int, tuple[Block, int]] = {}
    for name, size, stream in steps:
        if name in held:
            allocator.free(held.pop(name)[0])
            continue
        try:
            held[name] = allocator.allocate(size, stream), stream
        except OutOfMemory:
            assert limited
            continue
        assert held[name][0].size >= size and held[name][0].address % ROUNDING == 0
        ranges = sorted((block.address, block.address + block.size) for block, _ in held.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert sum(block.size for block, _ in held.values()) == allocator.allocated <= allocator.reserved
        assert not limited or allocator.reserved <= 600 * MIB
    for block, _ in held.values():
        allocator.free(block)
    assert allocator.allocated == 0


def test_a_replay_reports_peaks() -> None:
    trace: list[Event] = [(1, 64 * MIB, MAIN), (2, 100, MAIN), (1, 0, 0), (3, 32 * MIB, OTHER), (2, 0, 0), (3, 0, 0)]
    found = replay(trace, expandable=False)
    assert (found.allocated, found.reserved, found.retries) == (64 * MIB + 512, 98 * MIB, 0)
