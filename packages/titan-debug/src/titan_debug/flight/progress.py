"""Whether a rank has progressed since its dump. Imports no torch."""

from __future__ import annotations

from titan_debug.flight.dump import Dump, Entry
from titan_debug.flight.p2p import undone


def has_progressed(before: Dump, now: Dump, lost: bool) -> bool:
    """Whether the state that ``before`` shows is over within a step that continues.

    A rank that spent most of the time since ``before`` outside collectives and has only just joined one has not progressed:
    a new dump would hide that it was late. A rank that has failed makes no progress.

    Args:
        lost: whether the rank has since failed because another rank was gone or late. gloo retires failed collectives like
            completed ones.
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
