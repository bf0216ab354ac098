"""Compares the operations of all ranks: which collectives do not match, and which ranks wait for which. Sends and receives
are known only with NCCL: gloo does not record them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from titan_debug.flight.dump import Dump, Entry, Group

_EQUAL = {
    "all_reduce", "allreduce", "allreduce_coalesced", "broadcast", "_broadcast_oop", "reduce", "_reduce_oop",
    "all_gather", "all_gather_single", "_all_gather_base", "all_gather_into_tensor_coalesced", "allgather_coalesced",
    "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
}  # fmt: skip
"""Collectives in which every rank must contribute the same number of elements. Others (scatter, gather, all_to_all) allow
different numbers."""
_OPERATION = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)$")
_BATCH = "coalesced"


@dataclass(frozen=True)
class Channel:
    """The collectives of one process group and backend: all members must issue the same sequence."""

    group: Group
    backend: str
    by_rank: dict[int, dict[int, Entry]]
    """For each rank with a dump, its collectives by sequence number. The recorder keeps only the newest ones."""
    forgotten: set[int] = field(default_factory=set)
    """Ranks without a recorded collective here whose recorder has dropped some, possibly from this channel."""

    def last(self, rank: int) -> int:
        """Return the number of the last collective that ``rank`` started, or 0."""
        return max(self.by_rank[rank], default=0)


@dataclass(frozen=True)
class Mismatch:
    """A collective on which ranks disagree."""

    channel: Channel
    seq: int
    what: str
    """``operation``, ``type`` or ``shape``."""
    kinds: list[list[int]] = field(default_factory=list)
    """Groups of ranks that agree with each other, the largest group first."""

    @property
    def culprits(self) -> list[int]:
        """Ranks outside the largest group; all ranks if no group is the largest."""
        if len(self.kinds[0]) > len(self.kinds[1]):
            return sorted(rank for kind in self.kinds[1:] for rank in kind)
        return sorted(rank for kind in self.kinds for rank in kind)

    @property
    def begun(self) -> float:
        """When the first rank started it, in seconds since the epoch."""
        return min(entries[self.seq].created for entries in self.channel.by_rank.values() if self.seq in entries)


@dataclass(frozen=True)
class Wait:
    """A rank in a collective that other ranks have not joined."""

    rank: int
    channel: Channel
    entry: Entry
    behind: list[int]
    """Members of the group that have not started it."""
    unknown: list[int]
    """Members of the group whose records do not cover it."""


def channels(dumps: Iterable[Dump]) -> list[Channel]:
    """Return a channel for every process group and backend with a recorded collective."""
    dumps = [dump for dump in dumps if dump.recorded]
    found: dict[tuple[str, str, tuple[int, ...]], Channel] = {}
    for dump in dumps:
        groups = {group.name: group for group in dump.groups}
        for entry in dump.entries:
            group = groups.get(entry.group)
            if group is not None and not entry.p2p:
                key = (entry.backend, group.name, group.ranks)
                found.setdefault(key, Channel(group, entry.backend, {}))
    for (backend, name, ranks), channel in found.items():
        for dump in dumps:
            if dump.rank in ranks:
                own = [entry for entry in dump.entries if (entry.backend, entry.group) == (backend, name) and not entry.p2p]
                channel.by_rank[dump.rank] = {entry.seq: entry for entry in own}
                if not own and _has_forgotten(dump):
                    channel.forgotten.add(dump.rank)
    return list(found.values())


def _has_forgotten(dump: Dump) -> bool:
    """Whether the recorder has dropped old collectives. The numbers of each group start at 1."""
    firsts: dict[tuple[str, str], int] = {}
    for entry in dump.entries:
        if not entry.p2p:
            firsts.setdefault((entry.backend, entry.group), entry.seq)
    return any(first > 1 for first in firsts.values())


def mismatches(found: Iterable[Channel]) -> list[Mismatch]:
    """Return the first mismatch of each channel, the earliest first. Later mismatches of a channel follow from its first."""
    firsts = (next(iter(_mismatches(channel)), None) for channel in found)
    return sorted((mismatch for mismatch in firsts if mismatch is not None), key=lambda mismatch: mismatch.begun)


def _mismatches(channel: Channel) -> Iterable[Mismatch]:
    counts = Counter(seq for entries in channel.by_rank.values() for seq in entries)
    for seq in sorted(seq for seq, count in counts.items() if count > 1):
        entries = {rank: own[seq] for rank, own in channel.by_rank.items() if seq in own}
        for what, kinds in (
            ("operation", _kinds({rank: entry.op for rank, entry in entries.items()})),
            ("type", _kinds({rank: str(set(entry.input_dtypes)) for rank, entry in entries.items() if entry.input_dtypes})),
            ("shape", _kinds({rank: _size(entry) for rank, entry in entries.items() if entry.op in _EQUAL})),
        ):
            if len(kinds) > 1:
                yield Mismatch(channel, seq, what, kinds)
                break


def _kinds(by_rank: Mapping[int, str | int]) -> list[list[int]]:
    """Group the ranks by value, the largest group first."""
    groups: dict[str | int, list[int]] = {}
    for rank in sorted(by_rank):
        groups.setdefault(by_rank[rank], []).append(rank)
    return sorted(groups.values(), key=len, reverse=True)


def _size(entry: Entry) -> int:
    """Return the number of elements sent. Different shapes with equally many elements are compatible."""
    return sum(math.prod(size) for size in entry.input_sizes)


def waits(dumps: Sequence[Dump], found: Sequence[Channel]) -> list[Wait]:
    """Return the waits of each rank: in each of its groups, the first collective that others have not joined."""
    known = [
        Wait(dump.rank, channel, entry, *_absent(channel, entry.seq))
        for dump in dumps
        for channel in found
        if dump.rank in channel.by_rank
        for entry in (_pending(dump, channel),)
        if entry is not None
    ]
    return [wait for wait in known if wait.behind or wait.unknown]


def joined_by_all(dumps: Sequence[Dump], found: Sequence[Channel]) -> list[tuple[Channel, Entry, list[int]]]:
    """Return the collectives that every member of the group has started, with the ranks that have not completed them."""
    together: dict[tuple[int, int], tuple[Channel, Entry, list[int]]] = {}
    for dump in dumps:
        for number, channel in enumerate(found):
            entry = _pending(dump, channel) if dump.rank in channel.by_rank else None
            if entry is not None and _absent(channel, entry.seq) == ([], []):
                together.setdefault((number, entry.seq), (channel, entry, []))[2].append(dump.rank)
    return list(together.values())


def _pending(dump: Dump, channel: Channel) -> Entry | None:
    """Return the first collective that ``dump``'s rank has not completed. gloo retires failed collectives like completed
    ones, so for a rank that failed because of another rank, return the last collective of training that it started."""
    own = channel.by_rank[dump.rank]
    pending = [entry for entry in own.values() if not entry.done]
    if pending:
        return min(pending, key=lambda entry: entry.seq)
    training = [entry for entry in dump.entries if not entry.p2p and dump.training(entry)]
    if dump.lost and training and all(entry.done for entry in training):
        last = max(training, key=lambda entry: entry.created)
        return last if own.get(last.seq) is last else None
    return None


def _absent(channel: Channel, seq: int) -> tuple[list[int], list[int]]:
    """Return the ranks that have not started collective ``seq``, and the ranks for which this is unknown."""
    unknown = {rank for rank in channel.group.ranks if rank not in channel.by_rank or rank in channel.forgotten}
    behind = [rank for rank in channel.by_rank if rank not in unknown and channel.last(rank) < seq]
    return sorted(behind), sorted(unknown)


def waits_for_peers(dumps: Iterable[Dump]) -> tuple[list[Wait], list[Wait]]:
    """Return the first pending send or receive of each pair of ranks, in two lists: those whose peer has not started its
    side, and those whose peer has."""
    recorded = {dump.rank: dump for dump in dumps if dump.recorded}
    pending = {rank: _pending_p2p(dump) for rank, dump in recorded.items()}
    channels: dict[tuple[str, str, tuple[int, ...]], Channel] = {}
    waits: list[Wait] = []
    met: list[Wait] = []
    for rank, own in pending.items():
        for (group, kind, peer), entry in own.items():
            members = next(candidate for candidate in recorded[rank].groups if candidate.name == group)
            channel = channels.setdefault((entry.backend, group, members.ranks), Channel(members, entry.backend, {}))
            if (group, "recv" if kind == "send" else "send", rank) in pending.get(peer, {}):
                met.append(Wait(rank, channel, entry, [], []))
            else:
                behind, unknown = ([peer], []) if peer in recorded else ([], [peer])
                waits.append(Wait(rank, channel, entry, behind, unknown))
    return waits, met


def undone(dump: Dump) -> list[Entry]:
    """Return the entries that the rank has not completed. For a batch of operations, NCCL keeps only the state of the entry
    that closes the batch: collectives share its number, and sends and receives immediately precede it."""
    left: list[Entry] = []
    closing: dict[tuple[str, str], Entry] = {}
    last: dict[tuple[str, str, int], Entry] = {}
    for entry in reversed(dump.entries):
        channel = (entry.backend, entry.group)
        if not entry.p2p or entry.op == _BATCH:
            closing[channel] = entry
        if entry.p2p:
            after = closing.get(channel)
            state = after if after is not None and after.op == _BATCH else entry
        else:
            state = last.setdefault((*channel, entry.seq), entry)
        if not state.done:
            left.append(entry)
    return left[::-1]


def _pending_p2p(dump: Dump) -> dict[tuple[str, str, int], Entry]:
    """Return the first pending entry for each (group name, ``send`` or ``recv``, global rank of the peer)."""
    groups: dict[str, Group] = {group.name: group for group in dump.groups}
    found: dict[tuple[str, str, int], Entry] = {}
    for entry in undone(dump):
        operation = _OPERATION.match(entry.op) if entry.p2p else None
        if operation is not None and entry.group in groups:
            found.setdefault((entry.group, operation[1], _peer(groups[entry.group].ranks, int(operation[2]))), entry)
    return found


def _peer(ranks: Sequence[int], place: int) -> int:
    return ranks[place] if place < len(ranks) else place
