"""Measures what opening a dataset costs as it grows: CPU time and memory of two steps of ``llama3_debug`` by one process,
without and with data workers.

The tokenised datasets are folders of parts of ten million documents, which are links to one index and to one sparse file of
token ids: 1e10 documents take 80 MB of disk.

    uv run python benchmarks/data.py --growth
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy

from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_data.tokenized import Part, TokenizedIndex

DOCUMENT = 100
"""Tokens of a document."""
PART = 10_000_000


def tokenized(folder: Path, documents: int) -> Path:
    """Write a tokenised dataset of ``documents`` documents, in parts."""
    each = min(PART, documents)
    folder.mkdir()
    shared = folder.parent / f"{each}"
    if not shared.with_suffix(".idx").exists():
        with shared.with_suffix(".idx").open("wb") as index:
            for first in range(0, each, 1_000_000):
                ends = numpy.arange(first + 1, min(first + 1_000_000, each) + 1, dtype="<i8")
                index.write((ends * DOCUMENT).tobytes())
        with shared.with_suffix(".bin").open("wb") as tokens:
            tokens.truncate(each * DOCUMENT * 2)
    names = [f"part-{number:05d}" for number in range(documents // each)]
    for name in names:
        for ending in (".idx", ".bin"):
            os.link(shared.with_suffix(ending), folder / f"{name}{ending}")
    parts = tuple(Part(name, each, each * DOCUMENT) for name in names)
    TokenizedIndex("<u2", "byte", ByteTokenizer().fingerprint(), parts).write(folder)
    return folder


def json_lines(file: Path, size: int) -> Path:
    """Write about ``size`` bytes of JSON lines."""
    block = "".join(
        json.dumps({"text": f"document {number}: " + "words and words " * 60}) + "\n" for number in range(10_000)
    )
    with file.open("w") as out:
        for _ in range(max(1, size // len(block))):
            out.write(block)
    return file


def parquet(folder: Path, files: int) -> Path:
    """Write files of ten row groups, each with a hundred documents of a kilobyte."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    for file in range(files):
        texts = [f"document {file} {number}: " + "words and words " * 60 for number in range(1000)]
        table = pyarrow.table({"text": texts, "url": texts})
        pyarrow.parquet.write_table(table, folder / f"{file:05d}.parquet", row_group_size=100, compression="zstd")
    return folder


def measured(dataset: str, path: Path, workers: int, rounds: int) -> tuple[float, float, float]:
    """Return the CPU seconds of all processes, the MiB of the rank and the MiB of its largest data worker: the least of
    ``rounds`` runs of two steps."""
    command = [
        *(sys.executable, "-m", "titan_core", "train", "llama3_debug", "--training.steps", "2", "--model.tokenizer", "byte"),
        *("--training.dataset", dataset, "--training.dataset_path", str(path), "--data.num_workers", str(workers)),
        *("--checkpoint.enable", "false"),
    ]
    figures = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as run:
            before = _cpu_seconds()
            process = subprocess.Popen(
                [*command, "--job.dump_folder", run], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            own: dict[int, float] = {}
            while process.poll() is None:
                for pid in (process.pid, *_descendants(process.pid)):
                    own[pid] = max(own.get(pid, 0.0), _anonymous(pid))
                time.sleep(0.05)
            seconds = _cpu_seconds() - before
            assert process.returncode == 0, process.stdout and process.stdout.read()
        rank = max(own.values())
        others = sorted(own.values())[:-1]
        figures.append((seconds, rank, max(others, default=0.0)))
    return tuple(map(min, zip(*figures, strict=True)))  # type: ignore[return-value]


def _cpu_seconds() -> float:
    """Return the CPU time of processes that have ended. It depends less on what else the machine does than elapsed time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [one for child in children for one in _descendants(child)]


def _anonymous(pid: int) -> float:
    """Return the memory of a process in MiB, without mapped files, which the kernel may drop at any time."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return sum(int(lines.get(key, "0 kB").split()[0]) for key in ("RssAnon", "RssShmem")) / 1024


def growth(sizes: Sequence[int], gigabytes: Sequence[float], rounds: int) -> None:
    """Print the table."""
    print(
        "| dataset | workers | CPU seconds | MiB of the rank | MiB of the largest worker |\n| --- | --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as folder:
        for workers in (0, 4):
            for size in sizes:
                name = f"tokenised, {size:,} documents"
                path = Path(folder, f"{size}")
                _print(name, "tokenized", path if path.exists() else tokenized(path, size), workers, rounds)
        for size in gigabytes:
            file = json_lines(Path(folder, f"{size}.jsonl"), int(size * 1e9))
            _print(f"JSON lines, {size:g} GB, first start", "json", file, 0, 1)
            for workers in (0, 4):
                _print(f"JSON lines, {size:g} GB, later starts", "json", file, workers, rounds)
            file.unlink()
        for files in (100, 1000):
            path = parquet(Path(folder, f"parquet-{files}"), files)
            _print(f"Parquet, {files:,} files, first start", "parquet", path, 0, 1)
            for workers in (0, 4):
                _print(f"Parquet, {files:,} files, later starts", "parquet", path, workers, rounds)


def _print(name: str, dataset: str, path: Path, workers: int, rounds: int) -> None:
    seconds, rank, worker = measured(dataset, path, workers, rounds)
    print(f"| {name} | {workers} | {seconds:.1f} | {rank:.0f} | {f'{worker:.0f}' if workers else '-'} |", flush=True)
