"""Streams in memory with planted faults: after a restore, they stand elsewhere than they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy

from titan_core.api import Document
from titan_core.api.data.dataset import State


class Records:
    """One logical shard over records in memory, read in the order of their files."""

    def __init__(self, records: list[Any]) -> None:
        self.records, self.next = records, 0

    def __iter__(self) -> Records:
        return self

    def __next__(self) -> Document:
        if self.next >= len(self.records):
            raise StopIteration
        self.next += 1
        record = self.records[self.next - 1]
        if isinstance(record, Exception):
            raise record
        return record  # type: ignore[no-any-return]

    def state_dict(self) -> State:
        return {"next": self.next}

    def load_state_dict(self, state: State) -> None:
        self.next = state["next"]


class Source:
    """A stream: of unknown length and without a fingerprint, so that only its documents show what it is."""

    num_documents = None

    def __init__(self, files: list[list[Any]], shard: Callable[[list[Any]], Records] = Records, shift: int = 0) -> None:
        self.files, self.make, self.shift = files, shard, shift

    def shard(self, index: int, count: int, epoch: int) -> Records:
        records = list(itertools.chain.from_iterable(self.files))
        order = numpy.random.default_rng(epoch).permutation(len(records)) if epoch else range(len(records))
        ordered = [records[number] for number in order]
        return self.make(ordered[(index + self.shift) % count :: count])


class Frozen(Records):
    """After it is restored, its position stays where it was restored to: the fault of datasets 5.0.0."""

    restored: State | None = None

    def state_dict(self) -> State:
        return self.restored or super().state_dict()

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.restored = state


class AtZero(Frozen):
    """After it is restored, its position stays at zero."""

    def state_dict(self) -> State:
        return {"next": 0} if self.restored is not None else super().state_dict()


class Relative(Records):
    """After it is restored, its position is counted from there."""

    offset = 0

    def state_dict(self) -> State:
        return {"next": self.next - self.offset}

    def load_state_dict(self, state: State) -> None:
        self.next = self.offset = state["next"]


class OneLost(Records):
    def load_state_dict(self, state: State) -> None:
        self.next = state["next"] + 1


class OneTwice(Records):
    def load_state_dict(self, state: State) -> None:
        self.next = max(state["next"] - 1, 0)


class FromTheBeginning(Records):
    def load_state_dict(self, state: State) -> None:
        self.next = 0


class InsideADocument(Records):
    """Returns the rest of the first document after it is restored."""

    cut = 0

    def __next__(self) -> Document:
        cut, self.cut = self.cut, 0
        document = super().__next__()
        return document[cut:]

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.cut = 3 if state["next"] else 0


class OtherEpoch(Source):
    def shard(self, index: int, count: int, epoch: int) -> Records:
        return super().shard(index, count, epoch + 1)
