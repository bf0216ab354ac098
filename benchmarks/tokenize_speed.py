"""Compares ``titan data tokenize`` on all cores with as many processes that only call the tokenizer's batch encoding, on
texts in memory: the same tokens of the same JSON lines.

    OMP_NUM_THREADS=1 PYTHONPATH=benchmarks uv run python -m benchmarks.tokenize_speed
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.data import job_of, make_tokenizer, write_records
from titan_core.api import DatasetContext, TokenizerContext
from titan_core.data.stdlib import open_stdlib
from titan_data.engines import LocalEngine
from titan_data.tokenize import tokenize
from titan_models_llama.tokenizer import build

BATCH = 1000


def _encode(tokenizer: str, texts: list[str], copies: int) -> tuple[int, float]:
    """Return the number of tokens, and the seconds that encoding took."""
    encoding = build(TokenizerContext(tokenizer, section=None))._encoding
    encoding.encode_ordinary_batch(texts[:BATCH], num_threads=1)
    begin, tokens = time.perf_counter(), 0
    for _ in range(copies):
        for first in range(0, len(texts), BATCH):
            tokens += sum(map(len, encoding.encode_ordinary_batch(texts[first : first + BATCH], num_threads=1)))
    return tokens, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=16, help="of the corpus, for each process")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    source = open_stdlib(DatasetContext("stdlib", None, "text", 0, "", section=None))
    texts = [text[start : start + 2048] for text in map(str, source.shard(0, 1, 0)) for start in range(0, len(text), 2048)]
    alone, ours = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = folder / "tokenizer.model"
        make_tokenizer(tokenizer, texts)
        write_records(folder / "texts.jsonl", texts * (arguments.copies * arguments.processes))
        data = {"training.dataset": "json", "training.dataset_path": str(folder / "texts.jsonl")}
        job = job_of(folder, tokenizer, **data)
        for number in range(arguments.rounds):
            with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
                encoded = pool.starmap(
                    _encode, [(str(tokenizer), texts, arguments.copies)] * arguments.processes, chunksize=1
                )
            alone.append(sum(tokens / seconds for tokens, seconds in encoded))
            begin = time.perf_counter()
            engine = LocalEngine(arguments.processes)
            (*_, done) = tokenize(job.data, job.data.datasets[0], "llama3", folder / f"tokens-{number}", 16, engine)
            ours.append(done.tokens / (time.perf_counter() - begin))
    print(f"the tokenizer alone, {arguments.processes} processes: {statistics.median(alone) / 1e6:.2f} M tokens/s")
    print(f"titan data tokenize, start included: {statistics.median(ours) / 1e6:.2f} M tokens/s")


if __name__ == "__main__":
    main()
