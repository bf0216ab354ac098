"""What traced streams note: the document of each piece, in any order, packing and shuffling. Others note nothing."""

from __future__ import annotations

from typing import Any

import pytest

from harness.letters import BYTE, Letters, letters, stream
from harness.loaders import plan
from titan_core.api.data.dataset import StreamSpec
from titan_core.api.data.orders import NO_DOCUMENT, order_of
from titan_core.api.data.replay import StepRows
from titan_core.data.shards import ShardGroup
from titan_core.data.streams import open_sources


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("shuffle", ["documents", "blocks", "none"])
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("unpacked", [False, True])
def test_the_position_of_a_document_is_the_inverse_of_the_order(shuffle: Any, size: int, count: int, unpacked: bool) -> None:
    orders = [order_of(shuffle, size, size << 16, index, count, (5, 2), unpacked=unpacked) for index in range(count)]
    found = 0
    for index, order in enumerate(orders):
        for position, document in enumerate(order.documents_at(0, len(order)).tolist()):
            if document != NO_DOCUMENT:
                assert orders[0].shard_of(document) == index and order.position_of(document) == position
                found += 1
    assert found == size


LENGTHS = "3,9,0,30,5,!,1,17,2,8,4,11,6,25,7,0,12"
VARIANTS: dict[str, dict[str, Any]] = {
    "concatenate": {},
    "best_fit": {"packing_window": 5},
    "a stream's buffer": {"shuffle_buffer": 4},
    "best_fit of a buffer": {"packing_window": 3, "shuffle_buffer": 4},
}


def traced(spec: StreamSpec, positions: dict[str, Any] | None = None, traced: bool = True) -> ShardGroup:
    group = ShardGroup(spec, open_sources(spec), BYTE, range(2), traced)
    if positions is not None:
        group.load_positions(positions)
    return group


def read(group: ShardGroup) -> StepRows:
    rows = group.read()
    assert rows is not None
    return rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_piece_is_the_noted_part_of_its_document(variant: str) -> None:
    form = "stream:" if "shuffle_buffer" in VARIANTS[variant] else ""
    made = stream(
        letters(form + LENGTHS), on_corrupt="skip", plan=plan(1, global_size=4, shards=2, seq_len=12), **VARIANTS[variant]
    )
    text = Letters(LENGTHS.split(","), 33).text
    group, epochs, restored = traced(made), set(), None
    for step in range(30):
        rows = read(group)
        if restored is not None:
            assert read(restored).used == rows.used
        for tokens, lengths, used in zip(rows.tokens.tolist(), rows.lengths, rows.used, strict=True):
            assert [one.tokens for one in used] == lengths and lengths
            for one in used:
                assert one.document.place is not None and one.document.place.index is not None
                ids = BYTE.encode_document(text(one.document.place.index)).tolist()
                assert one.document.tokens == len(ids)
                assert tokens[: one.tokens] == ids[one.first : one.first + one.tokens]
                del tokens[: one.tokens]
                epochs.add(one.document.epoch)
        if step in (3, 11, 12):
            restored = traced(made, rows.positions)
    assert epochs >= {0, 1, 2}


def test_without_a_trace_nothing_is_noted() -> None:
    made = stream(letters(LENGTHS), on_corrupt="skip", plan=plan(1, global_size=4, shards=2, seq_len=12))
    first, second = traced(made, traced=False), traced(made)
    for _ in range(20):
        one, two = read(first), read(second)
        assert one.used == [] and two.used and (one.tokens == two.tokens).all()
        assert one.positions == two.positions
