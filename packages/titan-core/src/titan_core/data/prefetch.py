"""Reading ahead, beside training: in a thread, or in worker processes. Free of torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

from titan_core.api.dataset import DocumentSource, State, StepRows, StreamSpec
from titan_core.api.errors import UserError
from titan_core.api.tokenizer import TextTokenizer
from titan_core.api.tools.worker_process import ENDED, end_now, worker_processes
from titan_core.data.shards import ShardGroup
from titan_core.data.streams import open_sources

Positions = dict[str, State]


class Prefetch:
    """Reads the steps of some logical shards ahead. Each worker has logical shards of its own, so that their number changes
    nothing in what is read."""

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        tokenizer: TextTokenizer,
        indices: Sequence[int],
        workers: int,
        ahead: int,
        positions: Positions | None,
    ) -> None:
        """``positions``: where to begin; ``None`` at the beginning."""
        self._lanes = (
            [_Process(spec, part, positions) for part in _divided(indices, workers)]
            if workers
            else [_Thread(spec, sources, tokenizer, indices, positions)]
        )
        self._ahead: deque[list[Future[StepRows | None]]] = deque()
        for _ in range(ahead):
            self._ask()

    def next(self) -> list[StepRows] | None:
        """The next step's rows, in the order of the logical shards; ``None`` at the end of the data.

        Raises:
            UserError: the data cannot be read.
        """
        try:
            self._ask()
            parts = [future.result() for future in self._ahead.popleft()]
        except BrokenProcessPool:
            raise UserError.one("a data worker", ENDED, "lower data.num_workers or data.shuffle_buffer") from None
        whole = [part for part in parts if part is not None]
        return whole if len(whole) == len(parts) else None

    def close(self) -> None:
        """Read no further. What is being read is let go."""
        for lane in self._lanes:
            lane.close()

    def _ask(self) -> None:
        self._ahead.append([lane.read() for lane in self._lanes])


class _Thread:
    """Reads in a thread of this process: one that does not keep it from ending, wherever an interrupt has left it."""

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        tokenizer: TextTokenizer,
        indices: Sequence[int],
        positions: Positions | None,
    ) -> None:
        self._make = partial(_make_group, spec, sources, tokenizer, indices, positions)
        self._group: ShardGroup | None = None
        self._asked: SimpleQueue[Future[StepRows | None] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="data", daemon=True)
        self._thread.start()

    def read(self) -> Future[StepRows | None]:
        future: Future[StepRows | None] = Future()
        self._asked.put(future)
        return future

    def close(self) -> None:
        self._closed = True
        self._asked.put(None)
        if self._group is not None:
            self._group.stop()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while (future := self._asked.get()) is not None and not self._closed:
            try:
                if self._group is None:
                    self._group = self._make()
                future.set_result(self._group.read())
            except Exception as error:  # noqa: BLE001 - raised where the result is waited for
                future.set_exception(error)


class _Process:
    """Reads in a process of its own."""

    def __init__(self, spec: StreamSpec, indices: Sequence[int], positions: Positions | None) -> None:
        self._executor = worker_processes(1)
        self._executor.submit(_open, spec, indices, positions)

    def read(self) -> Future[StepRows | None]:
        return self._executor.submit(_read)

    def close(self) -> None:
        end_now(self._executor)


_group: Future[ShardGroup] = Future()
"""In a worker process: what it reads."""


def _open(spec: StreamSpec, indices: Sequence[int], positions: Positions | None) -> None:
    try:
        tokenizer = spec.tokenizer.load()(spec.tokenizer_context)
        _group.set_result(_make_group(spec, open_sources(spec), tokenizer, indices, positions))
    except Exception as error:  # noqa: BLE001 - kept for the first read, which raises it where it is waited for
        _group.set_exception(error)


def _read() -> StepRows | None:
    return _group.result().read()


def _make_group(
    spec: StreamSpec,
    sources: Sequence[DocumentSource],
    tokenizer: TextTokenizer,
    indices: Sequence[int],
    positions: Positions | None,
) -> ShardGroup:
    group = ShardGroup(spec, sources, tokenizer, indices)
    if positions is not None:
        group.go_to(positions)
    return group


def _divided(indices: Sequence[int], workers: int) -> list[Sequence[int]]:
    """``indices`` in order, in parts of almost the same size; no more parts than there are indices."""
    workers = min(workers, len(indices))
    cuts = [len(indices) * number // workers for number in range(workers + 1)]
    return [indices[first:last] for first, last in pairwise(cuts)]
