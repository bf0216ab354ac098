"""Measures how long a step waits for data on a file system whose requests take 10 ms, simulated, by ``data.shuffle``.

A file of token ids lies behind a reader that waits before each request; ranges that were announced are read by 16 requests
at a time, as the kernel does. Each of the ranks reads its logical shards in a thread of this process, as in a job with
``data.num_workers = 0``, and "trains" by sleeping.

    OMP_NUM_THREADS=1 uv run python -m benchmarks.slow_requests
"""

from __future__ import annotations

import argparse
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, cast

import numpy

from titan_core.api import BatchPlan, DatasetContext, Document, Ref, ShuffledDocuments, TokenizerContext
from titan_core.api.data.orders import BLOCK_BYTES
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_core.data.loader import DataLoader
from titan_core.toolkit.reading import DatasetSpec, StreamSpec

DOCUMENT = 1024
"""Tokens of a document, in two bytes each."""


class SlowTokens:
    """Documents in a file of which nothing is in memory at first."""

    def __init__(self, number: int, seconds: float) -> None:
        self._number, self._seconds = number, seconds
        self._per_block = BLOCK_BYTES // (2 * DOCUMENT)
        self._blocks: dict[int, Future[None]] = {}
        self._requests = ThreadPoolExecutor(16)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._number

    def read_ahead(self, first: int, last: int) -> None:
        with self._lock:
            for block in range(first // self._per_block, -(-last // self._per_block)):
                if block not in self._blocks:
                    self._blocks[block] = self._requests.submit(time.sleep, self._seconds)

    def text(self, index: int) -> Document:
        block = self._blocks.get(index // self._per_block)
        if block is None:
            time.sleep(self._seconds)  # a document of half a page, from anywhere
        else:
            block.result()
        return numpy.full(DOCUMENT, index % 256, numpy.uint16)

    @property
    def bytes(self) -> int:
        return self._number * DOCUMENT * 2


def waited(shuffle: Literal["documents", "blocks", "none"], ranks: int, steps: int, step: float, seconds: float) -> float:
    """Return the share of the time that the slowest rank waits for data.

    Args:
        step: seconds of a step without data.
        seconds: of a request.
    """
    plan = BatchPlan(8 * ranks, 8, 1, ranks, 8 * ranks, 2048)
    context: Any = DatasetContext("slow", None, "text", 0, "", section=None, shuffle=shuffle)
    dataset = DatasetSpec("slow", 1.0, cast("Any", Ref("none:none")), context)
    tokenizer_context: Any = TokenizerContext(None, section=None)
    spec = StreamSpec((dataset,), cast("Any", Ref("none:none")), tokenizer_context, plan, 0, "repeat", shuffle=shuffle)
    waits = [0.0] * ranks
    wholes = [0.0] * ranks

    def train(rank: int) -> None:
        documents = SlowTokens(4_000_000, seconds)
        source = ShuffledDocuments(documents, 0, shuffle=shuffle)
        source.__dict__["_bytes"] = documents.bytes, False
        loader = DataLoader(spec, [source], ByteTokenizer(), rank)
        loader.next_step()  # the first windows
        begin = time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            loader.next_step()
            waits[rank] += time.perf_counter() - before
            time.sleep(step)
        wholes[rank] = time.perf_counter() - begin
        loader.close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(wait / whole for wait, whole in zip(waits, wholes, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--request-seconds", type=float, default=0.01)
    arguments = parser.parse_args()
    for shuffle in ("documents", "blocks", "none"):
        share = waited(shuffle, arguments.ranks, arguments.steps, arguments.step_seconds, arguments.request_seconds)
        print(f"| `{shuffle}` | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
