"""Whether a rank has gone on since it dumped. Free of torch."""

from __future__ import annotations

from titan_debug.flight.dump import Dump, Entry
from titan_debug.flight.p2p import undone


def has_gone_on(before: Dump, now: Dump, lost: bool) -> bool:
    """Whether what ``before`` reports is over, in a step that continues. A rank that was late and has just joined, after
    most of the time since, must not hide that it was late. After a failure nothing continues.

    Args:
        lost: whether the rank has failed by now because another was gone or late: gloo lets go of what failed as of what is
            done.
    """
    if before.failure is not None or not now.recorded:
        return False
    begun = [entry for entry in now.entries if now.training(entry) and entry.created > before.time]
    waited = next((_name(entry) for entry in undone(before) if before.training(entry)), None)
    if waited is not None:
        still = any(_name(entry) == waited for entry in undone(now))
        return bool(begun) or not (still or lost)
    if len(begun) != 1:
        return len(begun) > 1
    joined = begun[0]
    return (joined.done and not lost) or now.time - joined.created > joined.created - before.time


def _name(entry: Entry) -> tuple[object, ...]:
    return entry.backend, entry.group, entry.op, entry.created
