"""Finds the ranks that compute wrong numbers, from what several ranks computed of the same work. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_debug.devices.groups import Ring

FOLDER = "debug/devices"
"""Folder for requests, relative to the run's directory."""
ALIKE, BAD, REFUSED = "devices alike", "bad device", "no device check"
"""Kinds of findings."""

Place = tuple[int, int, int, int]
"""The position of a result in the order in which an error spreads: outputs from the first layer on, then gradients from the
last layer on."""


@dataclass(frozen=True)
class Difference:
    """The first result in which two computations of the same work differ."""

    place: Place
    name: str
    """The module or parameter."""


@dataclass(frozen=True)
class Comparison:
    """Repetitions of one rank's work, compared with each other."""

    shifts: tuple[int, ...]
    """Of each repetition, the number of places in the ring from the group that computed it to this rank's group."""
    differences: Mapping[tuple[int, int], Difference]
    """Of the pairs of repetitions that differ, the first number being the lower one."""


@dataclass(frozen=True)
class Suspects:
    """Ranks that computed something else than others."""

    ranks: tuple[int, ...]
    name: str
    """Where their results first differ: a module or parameter."""
    everywhere: bool
    """Whether every group computed something else each time, so that no device is to blame."""


def suspects_in(ring: Ring, compared: Mapping[int, Sequence[Comparison]]) -> Suspects | None:
    """Return the ranks to blame, or ``None`` if all repetitions are equal.

    A group that computes something else when it repeats the same work is wrong. Otherwise most groups are right. Of two
    groups that disagree, both are suspect. Within a group, an error starts with the rank whose results differ first.

    Args:
        compared: by rank of the ring; all ranks have compared the same repetitions.
    """
    changing: set[int] = set()
    outvoted: set[int] = set()
    tied: set[int] = set()
    pairs: dict[int, list[Difference]] = {}  # by rank: where its results and those of others differ
    for number, group in enumerate(ring):
        for of_ranks in zip(*(compared[rank] for rank in group), strict=True):
            shifts = of_ranks[0].shifts
            different = {pair for one in of_ranks for pair in one.differences}
            groups_of: list[set[int]] = []  # that computed the same
            kinds: list[list[int]] = []  # the numbers of these repetitions
            for index, shift in enumerate(shifts):
                same = next((k for k, kind in enumerate(kinds) if (kind[0], index) not in different), len(kinds))
                if same == len(kinds):
                    kinds.append([])
                    groups_of.append(set())
                kinds[same].append(index)
                groups_of[same].add((number - shift) % len(ring))
            if len(kinds) == 1:
                continue
            most = max(map(len, groups_of))
            majority = [one for one in groups_of if len(one) == most]
            everyone = set().union(*groups_of)
            changing |= {one for one in everyone if sum(one in others for others in groups_of) > 1}
            if len(majority) == 1:
                outvoted |= everyone - majority[0]
            else:
                tied |= everyone
            for position, one in enumerate(of_ranks):
                for pair, difference in one.differences.items():
                    for index in pair:
                        executor = ring[(number - shifts[index]) % len(ring)][position]
                        pairs.setdefault(executor, []).append(difference)
    blamed = changing or outvoted or tied
    if not blamed:
        return None
    named: list[tuple[int, Difference]] = []
    for number in sorted(blamed):
        firsts = {rank: min(pairs[rank], key=lambda one: one.place) for rank in ring[number] if rank in pairs}
        earliest = min(one.place for one in firsts.values())
        named += [(rank, one) for rank, one in firsts.items() if one.place == earliest]
    return Suspects(tuple(rank for rank, _ in named), named[0][1].name, len(changing) == len(ring))
