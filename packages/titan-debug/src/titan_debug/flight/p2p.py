"""Who waits for whom in sends and receives. NCCL records them, gloo does not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from titan_debug.flight.dump import Dump, Entry, Group
from titan_debug.flight.matching import Channel, Wait

_OPERATION = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)$")
_BATCH = "coalesced"


def waits_for_peers(dumps: Iterable[Dump]) -> tuple[list[Wait], list[Wait]]:
    """The first send or receive that each rank is in with each other one: those that the other one has not begun its own
    part of, and those that it has, which wait for nobody."""
    recorded = {dump.rank: dump for dump in dumps if dump.recorded}
    pending = {rank: _pending(dump) for rank, dump in recorded.items()}
    channels: dict[tuple[str, str, tuple[int, ...]], Channel] = {}
    waits: list[Wait] = []
    met: list[Wait] = []
    for rank, own in pending.items():
        for (group, kind, peer), entry in own.items():
            of_group = next(one for one in recorded[rank].groups if one.name == group)
            channel = channels.setdefault((entry.backend, group, of_group.ranks), Channel(of_group, entry.backend, {}))
            if (group, "recv" if kind == "send" else "send", rank) in pending.get(peer, {}):
                met.append(Wait(rank, channel, entry, [], []))
            else:
                behind, unknown = ([peer], []) if peer in recorded else ([], [peer])
                waits.append(Wait(rank, channel, entry, behind, unknown))
    return waits, met


def undone(dump: Dump) -> list[Entry]:
    """What the rank is still in. Of operations that were begun as a batch, NCCL keeps no state but that of the entry which
    closes it: collectives have their number in common with it, sends and receives come right before it."""
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
    """By group, ``send`` or ``recv``, and the peer's rank among all: the first that is not done."""
    groups: dict[str, Group] = {group.name: group for group in dump.groups}
    found: dict[tuple[str, str, int], Entry] = {}
    for entry in undone(dump):
        operation = _OPERATION.match(entry.op) if entry.p2p else None
        if operation is not None and entry.group in groups:
            found.setdefault((entry.group, operation[1], _peer(groups[entry.group].ranks, int(operation[2]))), entry)
    return found


def _peer(ranks: Sequence[int], place: int) -> int:
    return ranks[place] if place < len(ranks) else place
