"""Follows the streams of the device: on which one each operator runs, and what it waits for.

Streams and events are torch's own; only their Python methods are observed, which all of torch's distributed code uses.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StreamOrder:
    """The order that streams and events impose on the operators of a rank, which are numbered as they are issued."""

    def __init__(self) -> None:
        self._issued = 0
        self._last: dict[int, int] = {}  # stream -> its latest operator
        self._events: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._pending: defaultdict[int, list[int]] = defaultdict(list)  # stream -> operators that its next one waits for

    def issue(self) -> tuple[int, int, tuple[int, ...]]:
        """Number an operator that is issued now.

        Returns:
            Its number, its stream, and the operators of other streams that it waits for.
        """
        stream = current_stream()
        number, self._issued = self._issued, self._issued + 1
        self._last[stream] = number
        return number, stream, tuple(self._pending.pop(stream, ()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe events within the ``with`` block."""
        kind: Any = torch.cuda.Event
        record, wait = kind.record, kind.wait

        def recorded(event: Any, stream: Any = None) -> None:
            record(event, stream)
            self._events[event] = self._last.get(_number(stream))

        def waited(event: Any, stream: Any = None) -> None:
            wait(event, stream)
            number = self._events.get(event)
            if number is not None:
                self._pending[_number(stream)].append(number)

        kind.record, kind.wait = recorded, waited
        try:
            yield
        finally:
            kind.record, kind.wait = record, wait


def current_stream() -> int:
    """Return the number of the stream on which this thread's operators run."""
    number: int = torch.accelerator.current_stream().stream_id
    return number


def _number(stream: Any) -> int:
    number: int = current_stream() if stream is None else stream.stream_id
    return number
