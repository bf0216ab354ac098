"""Measures how long the ranks of a job wait for data in an S3 store: ``titan train llama3_debug`` on 8 processes reads a
tokenised dataset from a server on loopback (moto's), by ``data.shuffle``. The server takes its share of the same cores.

    OMP_NUM_THREADS=1 PYTHONPATH=tests uv run python -m benchmarks.store_wait
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import pytest

from harness.fake_s3 import BUCKET, running, use
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_data.tokenized import Part, TokenizedIndex

DOCUMENT = 1024
"""Tokens of a document, in two bytes each."""


def tokenized(folder: Path, documents: int) -> None:
    """Write a tokenised dataset of random bytes."""
    folder.mkdir()
    ends = numpy.arange(1, documents + 1, dtype="<i8") * DOCUMENT
    (folder / "part-0.idx").write_bytes(ends.tobytes())
    ids = numpy.random.default_rng(0).integers(0, 256, documents * DOCUMENT, dtype=numpy.uint16)
    (folder / "part-0.bin").write_bytes(ids.astype("<u2").tobytes())
    part = Part("part-0", documents, documents * DOCUMENT)
    TokenizedIndex("<u2", "byte", ByteTokenizer().fingerprint(), (part,)).write(folder)


def waited(folder: Path, shuffle: str, ranks: int, steps: int) -> tuple[float, float]:
    """Return the seconds that the slowest rank waits for data in a step, and those of a step; the first step is left out."""
    settings = {
        "training.dataset": "tokenized",
        "training.dataset_path": f"s3://{BUCKET}/tokens",
        "training.steps": steps,
        "training.seq_len": 256,
        "training.local_batch_size": 1,
        "training.global_batch_size": ranks,
        "data.shuffle": shuffle,
        "metrics.log_freq": 1,
        "job.dump_folder": folder / shuffle,
    }
    command = [sys.executable, "-m", "titan_core", "train", "llama3_debug", "--nproc-per-node", str(ranks)]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    # The tests' own plugins, which PYTHONPATH shows, are no part of the job.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    records = [json.loads(line) for line in (folder / shuffle / "metrics.jsonl").read_text().splitlines()]
    later = [record for record in records if "data_seconds" in record and record["step"] > 1]
    assert len(later) == steps - 1
    return sum(one["data_seconds"] for one in later) / len(later), sum(one["step_seconds"] for one in later) / len(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--documents", type=int, default=32_768)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running() as store, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        use(store, patch, folder / "cache")
        tokenized(folder / "tokens", arguments.documents)
        store.put(folder / "tokens", "tokens/")
        for shuffle in ("documents", "blocks", "none"):
            patch.setenv("TITAN_CACHE_DIR", str(folder / f"cache-{shuffle}"))
            store.ranges.clear()
            wait, step = waited(folder, shuffle, arguments.ranks, arguments.steps)
            requests = len(store.ranges)
            print(f"| `{shuffle}` | {wait * 1000:.2f} ms | {step:.2f} s | {wait / step:.2%} | {requests} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
