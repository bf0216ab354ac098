"""Reading ahead, beside training: in a thread, or in worker processes. Free of torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise

from titan_core.data.shards import ShardGroup, StepRows
from titan_core.data.source import DocumentSource, State
from titan_core.data.stream_spec import StreamSpec
from titan_core.data.worker_process import worker_processes
from titan_core.errors import UserError
from titan_core.tokenizers.tokenizer import TextTokenizer

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
        self._ask()
        try:
            parts = [future.result() for future in self._ahead.popleft()]
        except BrokenProcessPool:
            why = "it ended unexpectedly (killed, or out of memory?)"
            raise UserError.one("a data worker", why, "lower data.num_workers or data.shuffle_buffer") from None
        whole = [part for part in parts if part is not None]
        return whole if len(whole) == len(parts) else None

    def close(self) -> None:
        """Read no further."""
        for lane in self._lanes:
            lane.executor.shutdown(wait=True, cancel_futures=True)

    def _ask(self) -> None:
        self._ahead.append([lane.read() for lane in self._lanes])


class _Thread:
    """Reads in a thread of this process."""

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        tokenizer: TextTokenizer,
        indices: Sequence[int],
        positions: Positions | None,
    ) -> None:
        self.executor: Executor = ThreadPoolExecutor(1, "data")
        self._group = self.executor.submit(_make_group, spec, sources, tokenizer, indices, positions)

    def read(self) -> Future[StepRows | None]:
        return self.executor.submit(lambda: self._group.result().read())


class _Process:
    """Reads in a process of its own."""

    def __init__(self, spec: StreamSpec, indices: Sequence[int], positions: Positions | None) -> None:
        self.executor: Executor = worker_processes(1)
        self.executor.submit(_open, spec, indices, positions)

    def read(self) -> Future[StepRows | None]:
        return self.executor.submit(_read)


_group: Future[ShardGroup] = Future()
"""In a worker process: what it reads."""


def _open(spec: StreamSpec, indices: Sequence[int], positions: Positions | None) -> None:
    try:
        tokenizer = spec.tokenizer.load()(spec.tokenizer_path)
        _group.set_result(_make_group(spec, spec.open_sources(), tokenizer, indices, positions))
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
