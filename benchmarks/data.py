"""Measures the speed of reading data: tokenising on the fly compared with the tokenizer alone, a tokenised dataset, and
resuming in it.

Everything runs on one core: one thread reads, and nothing trains. The tokenizer is made from the corpus with Llama's pattern
and a few thousand merges, because the real one cannot be downloaded everywhere.

    OMP_NUM_THREADS=1 taskset -c 0 uv run python benchmarks/data.py
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import tiktoken
from data_growth import growth

from titan_core.api import DatasetContext, TokenizerContext
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.data.loader import data_loader
from titan_core.data.shards import ShardGroup
from titan_core.data.stdlib import open_stdlib
from titan_core.data.streams import OpenedData
from titan_core.job.assemble import assemble
from titan_core.plugins.registry import Components
from titan_data.engines import LocalEngine
from titan_data.tokenize import tokenize
from titan_models_llama.tokenizer import build


def make_tokenizer(path: Path, texts: list[str]) -> None:
    """Write a rank file whose tokens are the most frequent words of the corpus and their prefixes."""
    words = Counter(word for text in texts for word in text.split())
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word, _ in words.most_common(6000):
        for spelled in (word.encode(), b" " + word.encode()):
            for length in range(2, min(len(spelled), 16) + 1):
                ranks.setdefault(spelled[:length], len(ranks))
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))


def job_of(folder: Path, tokenizer: Path, **settings: str) -> AssembledJob:
    given = {
        "model.tokenizer": "llama3",
        "model.tokenizer_path": str(tokenizer),
        "model.args": "{vocab_size = 100000, max_seq_len = 8192}",
        "training.seq_len": "2048",
        "training.local_batch_size": "4",
        "training.global_batch_size": "8",
        "job.dump_folder": str(folder / "run"),
        **settings,
    }
    overrides = [Override(key, value) for key, value in given.items()]
    return assemble(*load_config("llama3_debug", overrides, Components.from_installed()), 1)


def tokens_per_second(job: AssembledJob, steps: int, batches: bool) -> float:
    """Return the speed of reading rows for ``steps`` steps, or of making batches from them."""
    data, plan = OpenedData.of(job), job.data.plan
    if batches:
        loader = data_loader(job, data.training, 0)
        loader.next_step()
        started = time.perf_counter()
        for _ in range(steps):
            loader.next_step()
        seconds = time.perf_counter() - started
        loader.close()
    else:
        group = ShardGroup(job.data, data.training, job.text_tokenizer, range(plan.logical_shards))
        group.read()
        started = time.perf_counter()
        for _ in range(steps):
            group.read()
        seconds = time.perf_counter() - started
    return steps * plan.tokens_per_step / seconds


def write_records(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def tiktoken_alone(encoding: tiktoken.Encoding, texts: list[str]) -> tuple[int, float]:
    started = time.perf_counter()
    tokens = sum(len(encoding.encode_ordinary(text)) for text in texts)
    return tokens, tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=4, help="copies of the corpus in the tokenised dataset")
    parser.add_argument("--growth", action="store_true", help="measure what opening a dataset costs as it grows instead")
    parser.add_argument("--gigabytes", type=float, nargs="*", default=[1, 10], help="of JSON lines, with --growth")
    arguments = parser.parse_args()
    if arguments.growth:
        growth((1_000_000, 400_000_000, 10_000_000_000), arguments.gigabytes, arguments.rounds)
        return
    folder = Path(tempfile.mkdtemp(dir="."))
    source = open_stdlib(DatasetContext("stdlib", None, "text", 0, "", section=None))
    texts = [str(text) for text in source.shard(0, 1, 0)]
    tokenizer = folder / "tokenizer.model"
    make_tokenizer(tokenizer, texts)
    # A separate instance: a regular expression is fastest in the thread that used it first.
    encoding = build(TokenizerContext(str(tokenizer), section=None))._encoding
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    write_records(folder / "texts.jsonl", texts)
    alone: dict[str, list[float]] = {"text": [], "json": []}
    on_the_fly: dict[str, list[float]] = {"text": [], "json": []}
    for _ in range(arguments.rounds):
        for kind, file in (("text", "texts.txt"), ("json", "texts.jsonl")):
            fly = job_of(folder, tokenizer, **{"training.dataset": kind, "training.dataset_path": str(folder / file)})
            documents = [str(document) for document in OpenedData.of(fly).training[0].shard(0, 1, 0)]
            tokens, speed = tiktoken_alone(encoding, documents)
            alone[kind].append(speed)
            # One epoch, so that both read the same texts.
            on_the_fly[kind].append(tokens_per_second(fly, tokens // fly.data.plan.tokens_per_step - 6, batches=True))

    pieces = [text[start : start + 2048] for text in texts for start in range(0, len(text), 2048)] * arguments.copies
    write_records(folder / "pieces.jsonl", pieces)
    raw = job_of(folder, tokenizer, **{"training.dataset": "json", "training.dataset_path": str(folder / "pieces.jsonl")})
    (*_, done) = tokenize(raw.data, raw.data.datasets[0], "llama3", folder / "tokens", 16, LocalEngine(os.cpu_count() or 1))
    mapped_settings = {"training.dataset": "tokenized", "training.dataset_path": str(folder / "tokens")}
    mapped = job_of(folder, tokenizer, **mapped_settings)
    masked = job_of(folder, tokenizer, **mapped_settings, **{"data.document_mask": "true"})
    steps = done.tokens // mapped.data.plan.tokens_per_step - 10
    rows = [tokens_per_second(mapped, steps, batches=False) for _ in range(arguments.rounds)]
    batches = [tokens_per_second(mapped, steps, batches=True) for _ in range(arguments.rounds)]
    with_mask = [tokens_per_second(masked, steps, batches=True) for _ in range(arguments.rounds)]

    loader = data_loader(mapped, OpenedData.of(mapped).training, 0)
    for _ in range(10_000_000 // mapped.data.plan.tokens_per_step):
        loader.next_step()
    state = loader.state_dict()
    expected = loader.next_step()
    loader.close()
    resumed = []
    for _ in range(arguments.rounds):
        started = time.perf_counter()
        second = data_loader(mapped, OpenedData.of(mapped).training, 0)
        second.load_state_dict(state)
        got = second.next_step()
        resumed.append(time.perf_counter() - started)
        assert got is not None and expected is not None
        assert all(
            read.tokens.equal(first.tokens) for read, first in zip(got.microbatches, expected.microbatches, strict=True)
        )
        second.close()

    shutil.rmtree(folder)
    print(
        f"\n{sum(map(len, texts)) / 1e6:.1f} M characters; tiktoken {tiktoken.__version__}; medians of {arguments.rounds}\n"
    )
    for kind in alone:
        raw, ours = statistics.median(alone[kind]), statistics.median(on_the_fly[kind])
        figures = f"{raw / 1e6:.2f} M tokens/s; batches tokenised on the fly: {ours / 1e6:.2f}, {ours / raw:.2f} of that"
        print(f"tiktoken alone, {kind}: {figures}")
    print(f"tokenised dataset ({done.tokens / 1e6:.0f} M tokens in {len(pieces):,} documents)")
    print(f"  rows                            {statistics.median(rows) / 1e6:8.1f} M tokens/s")
    print(f"  batches                         {statistics.median(batches) / 1e6:8.1f} M tokens/s")
    print(f"  batches with document masks     {statistics.median(with_mask) / 1e6:8.1f} M tokens/s")
    print(f"  resuming at token 10 M          {statistics.median(resumed) * 1000:8.1f} ms to the first batch")


if __name__ == "__main__":
    main()
