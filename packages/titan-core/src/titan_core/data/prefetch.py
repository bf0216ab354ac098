"""Background reading of data, in a thread or in worker processes. Free of torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

from titan_core.api import DocumentSource, TextTokenizer, UserError
from titan_core.api.data.dataset import State, StreamSpec
from titan_core.api.data.replay import StepRows
from titan_core.data.shards import ShardGroup
from titan_core.data.streams import open_sources
from titan_core.toolkit.worker_process import ENDED, end_now, worker_processes

Positions = dict[str, State]


class Prefetch:
    """Reads the steps of some logical shards ahead. Each worker reads its own shards, so the number of workers does not
    affect the data."""

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
        """``positions``: where to start; ``None`` starts at the beginning."""
        self._lanes = (
            [_Process(spec, part, positions) for part in _divided(indices, workers)]
            if workers
            else [_Thread(partial(_make_group, spec, sources, tokenizer, indices, positions))]
        )
        self._ahead: deque[list[Future[StepRows | None]]] = deque()
        for _ in range(ahead):
            self._request()

    def next(self) -> list[StepRows] | None:
        """Return the next step's rows, in the order of the logical shards; ``None`` at the end of the data.

        Raises:
            UserError: the data cannot be read.
        """
        try:
            self._request()
            parts = [future.result() for future in self._ahead.popleft()]
        except BrokenProcessPool:
            raise UserError.one("a data worker", ENDED, "lower data.num_workers or data.shuffle_buffer") from None
        whole = [part for part in parts if part is not None]
        return whole if len(whole) == len(parts) else None

    def close(self) -> None:
        """Stop reading, and abandon reads that are under way."""
        for lane in self._lanes:
            lane.close()

    def _request(self) -> None:
        self._ahead.append([lane.read() for lane in self._lanes])


class _Thread:
    """Reads in a daemon thread, which cannot keep the process alive after an interrupt."""

    def __init__(self, make: Callable[[], ShardGroup]) -> None:
        self._make = make
        self._group: ShardGroup | None = None
        self._requests: SimpleQueue[Future[StepRows | None] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="data", daemon=True)
        self._thread.start()

    def read(self) -> Future[StepRows | None]:
        future: Future[StepRows | None] = Future()
        self._requests.put(future)
        return future

    def close(self) -> None:
        self._closed = True
        self._requests.put(None)
        if self._group is not None:
            self._group.stop()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while (future := self._requests.get()) is not None and not self._closed:
            try:
                if self._group is None:
                    self._group = self._make()
                future.set_result(self._group.read())
            except Exception as error:  # noqa: BLE001 - raised by ``result()``
                future.set_exception(error)


class _Process:
    """Reads in a separate process."""

    def __init__(self, spec: StreamSpec, indices: Sequence[int], positions: Positions | None) -> None:
        self._executor = worker_processes(1)
        self._executor.submit(_open, spec, indices, positions)

    def read(self) -> Future[StepRows | None]:
        return self._executor.submit(_read)

    def close(self) -> None:
        end_now(self._executor)


_group: Future[ShardGroup] = Future()
"""The shards that a worker process reads; set in worker processes only."""


def _open(spec: StreamSpec, indices: Sequence[int], positions: Positions | None) -> None:
    try:
        tokenizer = spec.tokenizer.load()(spec.tokenizer_context)
        _group.set_result(_make_group(spec, open_sources(spec), tokenizer, indices, positions))
    except Exception as error:  # noqa: BLE001 - raised by the first read
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
        group.load_positions(positions)
    return group


def _divided(indices: Sequence[int], workers: int) -> list[Sequence[int]]:
    """Divide ``indices``, in order, into at most ``workers`` nonempty parts of almost equal size."""
    workers = min(workers, len(indices))
    cuts = [len(indices) * number // workers for number in range(workers + 1)]
    return [indices[first:last] for first, last in pairwise(cuts)]
