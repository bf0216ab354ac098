"""Checks of the positions of logical shards that a checkpoint holds. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_core.api.data.dataset import State
from titan_core.data.streams import names_in


def checked_positions(saved: Mapping[str, Any], first: Mapping[str, State], identity: Mapping[str, Any]) -> dict[str, State]:
    """Return the saved positions of the shards in ``first``, in today's form and with those in today's datasets.

    Args:
        saved: what a loader saved: ``shards`` and ``stream_of``.
        first: the positions of the shards' beginnings, by name.
        identity: of today's stream (:func:`~titan_core.data.streams.stream_identity`).

    Raises:
        ValueError: a position is missing or malformed.
    """
    names = names_in(saved["stream_of"], identity), identity["names"]
    positions = {index: _moved(saved["shards"].get(index), position, *names) for index, position in first.items()}
    for index, position in first.items():
        if not _has_form_of(positions[index], {**position, "idle": None}):
            raise ValueError(f"logical shard {index} has no valid position in the data")
    return positions


def _moved(position: Any, first: State, before: Sequence[str], now: Sequence[str]) -> Any:
    """Return ``position`` in today's form, if it is a position, with those in the datasets ``now``.

    Args:
        first: the position of the beginning.
        before: names of the datasets when it was saved.
    """
    streams = position.get("streams") if isinstance(position, dict) else None
    idle = position.get("idle", {}) if isinstance(position, dict) else None
    if not isinstance(streams, list) or len(streams) != len(before) or not isinstance(idle, dict):
        return None
    known = {**idle, **dict(zip(before, streams, strict=True))}
    found = [_repacked(known.pop(name, begin), begin) for name, begin in zip(now, first["streams"], strict=True)]
    position = {**position, "streams": found, "idle": known}
    # As saved by versions whose global batch could not change.
    return {"first": 0, "global_size": first["global_size"], "idle": {}, **position}


def _repacked(stream: Any, first: State) -> Any:
    """Return the position in a dataset in the form of today's packing: the user may have accepted another one."""
    if not isinstance(stream, dict) or stream.keys() ^ first.keys() != {"length", "earlier"}:
        return stream
    return {key: stream.get(key) for key in first}


def _has_form_of(position: Any, first: Any, of_source: bool = False) -> bool:
    """Return whether ``position`` has the structure of ``first``, the position of a beginning, in which ``None`` matches
    anything, and a digest is ``None`` or text. Within the position of a source (``of_source``), keys may differ and lists
    may grow."""
    if isinstance(first, dict):
        same = isinstance(position, dict) and (of_source or position.keys() == first.keys())
        same = same and (of_source or isinstance(position.get("digest"), str | None))
        common = [(key, position[key], first[key]) for key in first if same and key in position]
        return same and all(
            _has_form_of(saved, one, of_source or key == "begin" or (key == "document" and not _is_shuffled(saved, one)))
            for key, saved, one in common
        )
    if isinstance(first, list):
        same = isinstance(position, list) and (of_source or len(position) == len(first))
        return same and (of_source or all(map(_has_form_of, position, first)))
    if isinstance(first, int):
        return type(position) is type(first) and position >= 0
    return first is None or isinstance(position, type(first))


def _is_shuffled(*states: Any) -> bool:
    """Return whether one of ``states`` is of a :class:`~titan_core.data.buffered_shuffle.BufferedShuffle`."""
    return any(isinstance(state, dict) and state.keys() == {"block", "begin", "given"} for state in states)
