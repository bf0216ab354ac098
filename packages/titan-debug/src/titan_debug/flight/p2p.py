"""Which ranks wait for which in sends and receives. NCCL records them; gloo does not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from titan_debug.flight.dump import Dump, Entry, Group
from titan_debug.flight.matching import Channel, Wait

_OPERATION = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)$")
_BATCH = "coalesced"


def waits_for_peers(dumps: Iterable[Dump]) -> tuple[list[Wait], list[Wait]]:
    """Return the first pending send or receive of each pair of ranks, in two lists: those whose peer has not started its
    side, and those whose peer has."""
    recorded = {dump.rank: dump for dump in dumps if dump.recorded}
    pending = {rank: _pending(dump) for rank, dump in recorded.items()}
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


def _pending(dump: Dump) -> dict[tuple[str, str, int], Entry]:
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
