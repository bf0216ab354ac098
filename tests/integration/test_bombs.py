"""Files that are small, or sparse, and become large when they are read: each reader answers within 30 s, and takes at most
1 GiB of memory more than before.

Each row runs in a process of its own, which measures itself: the peak of its resident memory is reset before it reads.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

MOST_BYTES, MOST_SECONDS = 2**30, 30.0
LARGE = 400 << 20
"""More than a page or batch may take."""

READ = """
import json, sys, time
from pathlib import Path
from titan_core.api import CorruptRecord, DatasetContext, UserError
from titan_core.toolkit.plain_json import read_object
from titan_data.csv_files import check_csv, open_csv
from titan_data.foreign.config import MdsSection
from titan_data.foreign.formats import check_tokens, open_tokens
from titan_data.local_files import check_files
from titan_data.record_files import check_tables, open_local
from titan_data.text_files import open_text
from titan_data.tokenized import check_tokenized, open_tokenized
from titan_data.tokenizers.chat_template import ChatTemplate
from titan_debug.profiling.traces import TraceEvents
from titan_models_llama.tokenizer import read_rank_file
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest
from titan_ckpt.format.stored import BrokenCheckpoint
import numpy, pyarrow.parquet, pyarrow.compute, pyarrow.ipc, zstandard

name, path = sys.argv[1:]

def memory(key):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

def dataset(check, opened, name=name, section=None):
    context = DatasetContext(name, path, "text", 0, "recipe: training.dataset_path", section=section, vocab_size=2**16)
    if problems := (check(context) if check else []):
        raise UserError(*problems)
    shard = opened(context).shard(0, 1, 0)
    for _ in range(4):
        document = next(shard, None)
    return f"read, {len(document or '')} long"

READERS = {
    "json": lambda: dataset(check_files, open_local),
    "csv": lambda: dataset(check_csv, open_csv),
    "text": lambda: dataset(None, open_text),
    "parquet": lambda: dataset(check_tables, open_local),
    "arrow": lambda: dataset(check_tables, open_local),
    "datatrove": lambda: dataset(check_tokens, open_tokens),
    "mds": lambda: dataset(check_tokens, open_tokens, section=MdsSection()),
    "tokenized": lambda: dataset(check_tokenized, open_tokenized),
    "config": lambda: read_object(Path(path), "fix it"),
    "template": lambda: ChatTemplate.read(Path(path).parent, {}),
    "trace": lambda: TraceEvents.read(Path(path)),
    "ranks": lambda: read_rank_file(Path(path), "fix it"),
    "manifest": lambda: read_manifest(Folder(str(Path(path).parent))),
}
Path("/proc/self/clear_refs").write_text("5")
idle, begin = memory("VmHWM"), time.process_time()
try:
    found = f"{READERS[name]()}"[:100]
except (UserError, BrokenCheckpoint) as error:
    found = str(error)
except CorruptRecord as error:
    found = f"{error.place}: {error.why}; {error.fix}"
print(json.dumps([found, memory("VmHWM") - idle, time.process_time() - begin]))
"""


def sparse(size: int = 200 << 30) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        file.touch()
        os.truncate(file, size)

    return make


def content(data: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(data())


def zeros(compressor: Any, size: int, times: int = 1) -> Callable[[Path], object]:
    """Write zeros as one stream, or the same stream many times."""

    def make(file: Path) -> None:
        block = bytes(1 << 20)
        stream = b"".join(compressor.compress(block) for _ in range(size >> 20)) + compressor.flush()
        file.write_bytes(stream * times)

    return make


def zstd_window(file: Path) -> None:
    """A frame with a window of 2 GiB, which four bytes for each 128 KiB fill (RFC 8878)."""
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    file.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3]) + block * 20_000)


def parquet(table: Callable[[], pyarrow.Table], **options: Any) -> Callable[[Path], None]:
    return lambda file: pyarrow.parquet.write_table(table(), file, **{"compression": "zstd"} | options)


def repeated(value: pyarrow.Scalar | bytes | str, count: int) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(numpy.zeros(count, numpy.int32), pyarrow.array([value]))


def one_list(values: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.LargeListArray.from_arrays(pyarrow.array([0, len(values)], pyarrow.int64()), values)


def arrow(table: Callable[[], pyarrow.Table], compression: str | None = "zstd") -> Callable[[Path], None]:
    def make(file: Path) -> None:
        found = table()
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with pyarrow.ipc.new_file(file, found.schema, options=options) as out:
            out.write_table(found)

    return make


def claimed(file: Path) -> None:
    """A buffer that claims to be 100 GiB once it is decompressed."""
    arrow(lambda: pyarrow.table({"text": ["a" * 1000] * 100}))(file)
    data = file.read_bytes()
    size = struct.pack("<q", 100_000)
    assert data.count(size) == 1
    file.write_bytes(data.replace(size, struct.pack("<q", 100 << 30)))


def datatrove(file: Path) -> None:
    """One document of 100 G tokens."""
    sparse()(file)
    file.with_name(f"{file.name}.index").write_bytes(struct.pack("<Q", 100 << 30))


def mds(file: Path) -> None:
    """A shard that becomes 20 GiB."""
    shard = file.with_name("shard.00000.mds.zst")
    zeros(zstandard.ZstdCompressor().compressobj(), 64 << 20, 320)(shard)
    about = {"basename": shard.name, "bytes": shard.stat().st_size, "hashes": {}}
    raw = {"basename": "shard.00000.mds", "bytes": 20 << 30, "hashes": {}}
    entry = {
        "format": "mds", "version": 2, "samples": 1, "raw_data": raw, "zip_data": about, "compression": "zstd",
        "column_names": ["tokens"], "column_encodings": ["ndarray:uint16"], "column_sizes": [None], "hashes": [],
    }  # fmt: skip
    file.write_text(json.dumps({"version": 2, "shards": [entry]}))


OBJECTS = b'{"text": "a", "more": ' + b"[" * 400 + b"]" * 400 + b"}\n"


@cache
def deep() -> bytes:
    return b",".join([b"[" * 400 + b"]" * 400] * 20_000)


LINES = b'{"text": "a"}\n' * 10
LIMIT = r"data\.max_record_bytes"
BOMBS: dict[str, tuple[str, str, Callable[[Path], object], str]] = {
    # reader, file, how it is made, what the answer matches
    "JSON lines without an end": ("json", "a.jsonl", sparse(), LIMIT),
    "JSON lines, then one without an end": (
        "json",
        "a.jsonl",
        lambda file: (file.write_bytes(LINES), os.truncate(file, 200 << 30)),
        rf"a\.jsonl:11.*{LIMIT}",
    ),
    "JSON without an end": ("json", "a.json", sparse(), LIMIT),
    "a JSON array without an end": (
        "json",
        "a.json",
        lambda file: (file.write_bytes(b'[\n{"text": "' + b"a" * 100), os.truncate(file, 200 << 30)),
        "not JSON|max_record_bytes",
    ),
    "a JSON array with a record of 300 MB": (
        "json",
        "a.json",
        content(lambda: b'[{"text": "' + b"a" * (300 << 20) + b'"}]'),
        LIMIT,
    ),
    "a line of 100 MB": (
        "json",
        "a.jsonl",
        content(lambda: LINES + b'{"text": "' + b"a" * (100 << 20) + b'"}\n'),
        "read|max_record",
    ),
    "a line of 16 MB that is all brackets": (
        "json",
        "a.jsonl",
        content(lambda: b'{"text": "a", "b": [' + deep() + b"]}\n"),
        "read",
    ),
    "a JSON array with a record of 100 MB that is all brackets": (
        "json",
        "a.json",
        content(lambda: b'[{"text": "a"},\n{"text": "b", "more": [' + deep() * 6 + b"]}]"),
        LIMIT,
    ),
    "CSV without an end": ("csv", "a.csv", sparse(), LIMIT),
    "CSV with an endless value": (
        "csv",
        "a.csv",
        lambda file: (file.write_bytes(b'text\na\n"'), os.truncate(file, 200 << 30)),
        LIMIT,
    ),
    "text without a line end": ("text", "a.txt", sparse(), "read"),
    "bzip2, one stream": ("json", "a.jsonl.bz2", zeros(bz2.BZ2Compressor(), 1 << 30), LIMIT),
    "bzip2 of text, one stream": ("text", "a.txt.bz2", zeros(bz2.BZ2Compressor(), 1 << 30), "times as large"),
    "gzip, many streams": (
        "text",
        "a.txt.gz",
        lambda file: file.write_bytes(gzip.compress(bytes(64 << 20)) * 40),
        "times as",
    ),
    "xz, many streams": (
        "text",
        "a.txt.xz",
        lambda file: file.write_bytes(lzma.compress(bytes(64 << 20)) * 400),
        "times as",
    ),
    "zstd, many streams": ("text", "a.txt.zst", zeros(zstandard.ZstdCompressor().compressobj(), 64 << 20, 400), "times as"),
    "zstd with a window of 2 GiB": ("text", "a.txt.zst", zstd_window, f"window.*{LIMIT}"),
    "JSON lines in zstd": ("json", "a.jsonl.zst", zeros(zstandard.ZstdCompressor().compressobj(), 64 << 20, 400), LIMIT),
    "CSV in gzip": ("csv", "a.csv.gz", lambda file: file.write_bytes(gzip.compress(bytes(64 << 20)) * 40), "times as large"),
    "a Parquet dictionary": (
        "parquet",
        "a.parquet",
        parquet(lambda: pyarrow.table({"text": repeated("a" * (1 << 20), 10_000)})),
        "read",
    ),
    "a Parquet dictionary of one huge value": (
        "parquet",
        "a.parquet",
        parquet(lambda: pyarrow.table({"text": repeated("a" * (100 << 20), 10_000)})),
        f"the row.*{LIMIT}",
    ),
    "a Parquet dictionary in a list": (
        "parquet",
        "a.parquet",
        parquet(lambda: pyarrow.table({"text": ["a"], "more": one_list(repeated("a" * (1 << 20), 10_000))})),
        "read",
    ),
    "a Parquet page": (
        "parquet",
        "a.parquet",
        parquet(lambda: pyarrow.table({"text": ["a" * LARGE]}), use_dictionary=False),
        f"a page.*{LIMIT}",
    ),
    "equal beginnings in Parquet": (
        "parquet",
        "a.parquet",
        parquet(
            lambda: pyarrow.table({"text": ["a" * (1 << 20)] * 500}),
            use_dictionary=False,
            column_encoding={"text": "DELTA_BYTE_ARRAY"},
        ),
        "read",
    ),
    "a hundred million rows of Parquet": (
        "parquet",
        "a.parquet",
        parquet(lambda: pyarrow.table({"text": repeated("a", 100_000_000)}), row_group_size=1 << 40),
        "read",
    ),
    "a compressed Arrow batch": ("arrow", "a.arrow", arrow(lambda: pyarrow.table({"text": ["a" * LARGE]})), LIMIT),
    "an Arrow buffer that claims 100 GiB": ("arrow", "a.arrow", claimed, LIMIT),
    "a compressed Arrow dictionary": (
        "arrow",
        "a.arrow",
        arrow(lambda: pyarrow.table({"text": repeated("a" * LARGE, 10)})),
        LIMIT,
    ),
    "two billion nulls in an Arrow list": (
        "arrow",
        "a.arrow",
        arrow(lambda: pyarrow.table({"text": one_list(pyarrow.nulls(2**31 - 1))}), None),
        "not text|max_record",
    ),
    "a datatrove document of 100 G tokens": ("datatrove", "a.ds", datatrove, LIMIT),
    "a shard of MDS in zstd": ("mds", "index.json", mds, "times as large"),
    "a config of 20 GB": ("config", "config.json", sparse(20 << 30), "is longer than 16,777,216 bytes"),
    "a config that is all brackets": (
        "config",
        "config.json",
        content(lambda: b'{"a": [' + deep()[: 16_000_000 // 801 * 801 - 1] + b"]}"),
        "a",
    ),
    "a template of 20 GB": ("template", "chat_template.jinja", sparse(20 << 30), "is longer than"),
    "an index of 20 GB": ("tokenized", "tokenized.json", sparse(20 << 30), "is longer than"),
    "ranks of 20 GB": ("ranks", "tokenizer.model", sparse(20 << 30), "is longer than"),
    "a manifest of 20 GB": ("manifest", "checkpoint.json", sparse(20 << 30), "is longer than"),
    "a trace in gzip": (
        "trace",
        "rank-0.json.gz",
        lambda file: file.write_bytes(gzip.compress(bytes(64 << 20)) * 400),
        "is longer",
    ),
}


QUICK = ("JSON lines without an end", "zstd with a window of 2 GiB")
"""One of each kind. The others are as many rows of one table."""


@pytest.mark.parametrize("bomb", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in BOMBS])
def test_a_bomb_takes_little_memory_and_time(bomb: str, tmp_path: Path) -> None:
    reader, name, make, answer = BOMBS[bomb]
    make(tmp_path / name)
    path = tmp_path if reader in ("tokenized", "mds") else tmp_path / name
    environment = {**os.environ, "TITAN_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READ, reader, str(path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, memory, seconds = json.loads(done.stdout)
    print(f"{bomb}: {memory / 2**20:.0f} MiB, {seconds:.1f} s: {found}")
    assert re.search(answer, found, re.DOTALL), found
    assert memory < MOST_BYTES and seconds < MOST_SECONDS
