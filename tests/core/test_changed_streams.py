"""A stream that continues after its sources, its batch or the length of its sequences has changed: no token is lost or read
twice, and each source continues where it stood."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from harness.letters import BYTE, letters, stream
from harness.loaders import close, loaders_of, merged, plan
from titan_core.api import UserError
from titan_core.api.data.dataset import DatasetSpec, State, StreamSpec
from titan_core.data.loader import DataLoader
from titan_core.data.shards import Mixture, ShardGroup
from titan_core.data.streams import open_sources

ALLOWED = ["data.mixture", "dataset.*.weight"]
SHARDS = 2
LENGTHS = ",".join(str(1 + index * 7 % 23) for index in range(80))
Tokens = dict[tuple[str, int], list[int]]
"""The tokens that were read, by dataset and logical shard."""


def source(name: str, weight: float = 1.0, seed: int = 0) -> DatasetSpec:
    return replace(letters(LENGTHS, weight=weight, seed=seed), name=name)


def spec(*datasets: DatasetSpec, size: int = 4, seq_len: int = 7, window: int = 0, on_end: str = "repeat") -> StreamSpec:
    batch = plan(1, global_size=size, shards=SHARDS, seq_len=seq_len)
    return stream(*datasets, plan=batch, packing_window=window, on_end=on_end)


def loader_of(spec: StreamSpec, state: State | None = None) -> DataLoader:
    (loader,) = loaders_of(spec)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)), ALLOWED)
    return loader


def read(spec: StreamSpec, steps: int, state: State | None, found: Tokens) -> State:
    """Read ``steps`` of ``spec`` from ``state`` (up to the end of the data), add their tokens to ``found``, and return the
    position after them."""
    loader = loader_of(spec, state)
    group = ShardGroup(spec, open_sources(spec), BYTE, range(SHARDS))
    group.load_positions(loader.state_dict()["shards"])
    close([loader])
    per_shard = spec.plan.global_size // SHARDS
    for _ in range(steps):
        rows = group.read()
        if rows is None or rows.ended:
            break
        for row, (tokens, lengths, dataset) in enumerate(zip(rows.tokens, rows.lengths, rows.datasets, strict=True)):
            found[spec.datasets[dataset].name, row // per_shard] += tokens[: sum(lengths)].tolist()
    positions = group.positions()
    return {"stream_of": loader._stream, "shards": json.loads(json.dumps(positions))}


A, B, C = source("a"), source("b", seed=1), source("c", seed=2)
SOURCES: dict[str, list[tuple[DatasetSpec, ...]]] = {
    "one more": [(A, B), (A, B, C)],
    "one less": [(A, B, C), (C, A)],
    "one that comes back": [(A, B), (B,), (A, B)],
    "other weights": [(A, B), (replace(A, weight=9.0), B)],
    "another order": [(A, B), (B, A)],
}
SHAPES = {"as before": [(4, 7)], "batch": [(4, 7), (8, 7), (2, 7)], "length": [(4, 7), (4, 20), (4, 3)]}


def specs(sources: Sequence[tuple[DatasetSpec, ...]], shapes: Sequence[tuple[int, int]], **more: object) -> list[StreamSpec]:
    """Return the stream of each segment, as many as the longer of the two has."""
    count = max(len(sources), len(shapes))
    parts = ((sources[min(number, len(sources) - 1)], shapes[min(number, len(shapes) - 1)]) for number in range(count))
    return [spec(*datasets, size=size, seq_len=length, **more) for datasets, (size, length) in parts]  # type: ignore[arg-type]


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("sources", SOURCES)
def test_each_source_continues_where_it_stood(sources: str, shapes: str) -> None:
    """The tokens of a source are those of a stream that has only this source, in the same order."""
    found: Tokens = defaultdict(list)
    state = None
    for segment in specs(SOURCES[sources], SHAPES[shapes]):
        state = read(segment, 7, state, found)
    for (name, shard), tokens in found.items():
        alone: Tokens = defaultdict(list)
        read(spec({"a": A, "b": B, "c": C}[name], size=2), len(tokens), None, alone)
        assert tokens == alone[name, shard][: len(tokens)]


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_packed_documents_are_used_once_where_the_length_changes(steps: int) -> None:
    """What is left of a block is packed for the new length: each token of the data is read once."""
    found: Tokens = defaultdict(list)
    state = None
    segments = specs([(A,)], [(4, 20), (2, 9), (4, 31)], window=16, on_end="once")
    for segment, number in zip(segments, (steps, steps, 1000), strict=True):
        state = read(segment, number, state, found)
    alone: Tokens = defaultdict(list)
    read(spec(A, on_end="once"), 1000, None, alone)
    for key, tokens in alone.items():
        assert Counter(found[key]) == Counter(tokens)


@pytest.mark.parametrize("window", [0, 16])
def test_a_position_saved_after_a_change_is_that_of_the_stream_that_changed(window: int) -> None:
    """Positions in each step of a segment lead to the same tokens as reading on, whatever changed before."""
    segments = specs([(A, B), (A, B, C)], [(4, 20), (8, 9)], window=window)
    first = read(segments[0], 3, None, defaultdict(list))
    whole: Tokens = defaultdict(list)
    read(segments[1], 6, first, whole)
    for steps in range(6):
        parts: Tokens = defaultdict(list)
        read(segments[1], 6 - steps, read(segments[1], steps, first, parts), parts)
        assert parts == whole


def test_sequences_are_numbered_on_where_the_batch_changes() -> None:
    """The dataset of each sequence is that of its number in the run."""
    state, taken = None, 0
    mixture = Mixture([1.0, 3.0], seed=0)
    for segment in specs([(A, replace(B, weight=3.0))], [(4, 7), (6, 7), (2, 7)]):
        loader = loader_of(segment, state)
        group = ShardGroup(segment, open_sources(segment), BYTE, range(SHARDS))
        group.load_positions(loader.state_dict()["shards"])
        close([loader])
        for _ in range(10):
            rows = group.read()
            size = segment.plan.global_size
            assert rows is not None and rows.datasets == [mixture.dataset_of(taken + row) for row in range(size)]
            taken += size
        state = read(segment, 10, state, defaultdict(list))


def test_changes_that_are_not_allowed_are_refused_by_name() -> None:
    before, after = specs([(A, B), (replace(A, weight=2.0), C)], [(4, 7)])
    state = read(before, 2, None, defaultdict(list))
    other = loader_of(after)
    assert [change.key for change in other.refused_changes(state)] == ["data.mixture", "dataset.a.weight"]
    with pytest.raises(UserError, match=r'allow_changed = \["data.mixture", "dataset.a.weight"\]'):
        other.load_state_dict(state)
    assert not other.refused_changes(state, ALLOWED)
    close([other])


def test_a_position_of_a_version_without_changes_is_read() -> None:
    made = spec(A, B)
    state = read(made, 3, None, defaultdict(list))
    new: Tokens = defaultdict(list)
    read(made, 3, state, new)
    for position in state["shards"].values():
        for key in ("first", "global_size", "idle"):
            del position[key]
    old: Tokens = defaultdict(list)
    read(made, 3, state, old)
    assert old == new


def test_positions_of_sources_that_left_are_kept_on_any_ranks() -> None:
    before, after = specs([(A, B), (B,)], [(4, 7)])
    state = read(after, 2, read(before, 3, None, defaultdict(list)), defaultdict(list))
    two = [*loaders_of(replace(after, plan=plan(2, global_size=4, shards=SHARDS, seq_len=7)))]
    for loader in two:
        loader.load_state_dict(state)
    assert merged(two) == state
    close(two)
    for one, other in pairwise(state["shards"].values()):
        assert list(one["idle"]) == list(other["idle"]) == ["a"]
