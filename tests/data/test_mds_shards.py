"""Damaged shards of MosaicML Streaming are refused with the reason, and compressed ones are those decompressed."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import zstandard

from harness.foreign_tokens import context, copied, patched, problems
from titan_data.foreign.config import MdsSection
from titan_data.foreign.formats import open_tokens

pytestmark = pytest.mark.usefixtures("cache_folder")


def bad_mds(change: Callable[[dict[str, Any], Path], object], name: str = "mds_int32") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = copied(folder, name)
        contents = json.loads((path / "index.json").read_text())
        change(contents, path)
        (path / "index.json").write_text(json.dumps(contents))
        return path

    return make


def cut(file: Path) -> dict[str, Any]:
    """Compress half of a shard; return what the index says of the file."""
    content = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(content[: len(content) // 2]))
    return {"basename": file.name, "bytes": file.stat().st_size}


MISTAKES: dict[str, tuple[Callable[[Path], Path], MdsSection, str]] = {
    "mds: nothing there": (lambda folder: folder, MdsSection(), "contains no index.json; name the folder that"),
    "mds: splits": (
        lambda folder: copied(folder, "mds_int32").parent,
        MdsSection(),
        "index.json; name one of its folders: mds_int32",
    ),
    "mds: version": (bad_mds(lambda index, path: index.update(version=3)), MdsSection(), "has version 3, but this"),
    "mds: format": (
        bad_mds(lambda index, path: index["shards"][0].update(format="json")),
        MdsSection(),
        "has format 'json', not",
    ),
    "mds: another compression": (
        bad_mds(
            lambda index, path: [
                one.update(compression="br:11", zip_data={**one["zip_data"], "basename": "shard.00000.mds.br"})
                for one in index["shards"]
            ],
            "mds_zstd",
        ),
        MdsSection(),
        "shard 0: is compressed (br:11), which titan-data does not read; write the dataset with zstd, gz or bz2",
    ),
    "mds: a lost compressed shard": (
        bad_mds(lambda index, path: (path / "shard.00001.mds.zstd").unlink(), "mds_zstd"),
        MdsSection(),
        "shard.00001.mds.zstd: is missing",
    ),
    "mds: a damaged compressed shard": (
        bad_mds(
            lambda index, path: (path / "shard.00000.mds.gz").write_bytes(bytes(index["shards"][0]["zip_data"]["bytes"])),
            "mds_gz",
        ),
        MdsSection(),
        "shard.00000.mds.gz: cannot be decompressed as gzip",
    ),
    "mds: a short compressed shard": (
        bad_mds(lambda index, path: (path / "shard.00000.mds.zstd").write_bytes(b"1234"), "mds_zstd"),
        MdsSection(),
        "shard.00000.mds.zstd: has 4 bytes, but index.json says 425 and 3 samples",
    ),
    "mds: half a shard, compressed": (
        bad_mds(lambda index, path: index["shards"][0].update(zip_data=cut(path / "shard.00000.mds.gz")), "mds_gz"),
        MdsSection(),
        "shard.00000.mds.gz, sample 1: damaged: it lies at bytes",
    ),
    "mds: a lost shard": (
        bad_mds(lambda index, path: (path / "shard.00001.mds").unlink()),
        MdsSection(),
        "shard.00001.mds: is missing",
    ),
    "mds: a short shard": (
        bad_mds(lambda index, path: (path / "shard.00001.mds").write_bytes(b"")),
        MdsSection(),
        "has 0 bytes, but index",
    ),
    "mds: elsewhere": (
        bad_mds(lambda index, path: index["shards"][0]["raw_data"].update(basename="../x.mds")),
        MdsSection(),
        "names the file '../x.mds', which is not in the folder",
    ),
    "mds: fewer than no samples": (
        bad_mds(lambda index, path: index["shards"][0].update(samples=-5)),
        MdsSection(),
        "shard 0: damaged: ValueError samples is -5",
    ),
    "mds: no list": (
        bad_mds(lambda index, path: index["shards"].insert(0, 5)),
        MdsSection(),
        "shard 0: damaged: TypeE",
    ),
    "mds: no type": (
        bad_mds(lambda index, path: None, "mds_bytes"),
        MdsSection(),
        "plain bytes, which do not record the type",
    ),
    "mds: text": (
        bad_mds(lambda index, path: None),
        MdsSection(column="source"),
        "column 'source' is encoded as 'str', and not as an array of integers (columns: source (str), tokens (nda",
    ),
    "mds: no such column": (
        bad_mds(lambda index, path: None),
        MdsSection(column="ids"),
        "has no column 'ids' (columns: source (str), tokens",
    ),
    "mds: no array": (
        bad_mds(
            lambda index, path: [
                one.update(column_names=["a", "b"], column_encodings=["str", "str"]) for one in index["shards"]
            ]
        ),
        MdsSection(),
        "has no column that may be token ids",
    ),
    "mds: a sample": (
        bad_mds(lambda index, path: patched(path / "shard.00000.mds", 4, struct.pack("<I", 5))),
        MdsSection(),
        "shard.00000.mds, sample 0: damaged: it lies at bytes 5 to",
    ),
    "mds: a size": (
        bad_mds(
            lambda index, path: patched(
                path / "shard.00000.mds",
                int(numpy.frombuffer((path / "shard.00000.mds").read_bytes(), "<u4", 1, 4)[0]),
                struct.pack("<I", 10**6),
            )
        ),
        MdsSection(),
        "damaged: its columns are longer than the sample",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_understood_is_refused(mistake: str, tmp_path: Path) -> None:
    make, section, message = MISTAKES[mistake]
    (problem,) = problems(context("mds", make(tmp_path), section))
    assert message in problem


@pytest.mark.parametrize(("name", "unpack"), [("mds_zstd", zstandard.decompress), ("mds_gz", gzip.decompress)])
def test_compressed_shards_are_those_decompressed_beside_them(
    name: str, unpack: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = context("mds", copied(tmp_path, name), MdsSection())
    assert problems(asked) == []
    assert len(caplog.messages) == 1, "a check decompresses one shard, not all"
    fingerprints = [open_tokens(asked).fingerprint for _ in range(2)]
    assert len(caplog.messages) == 5, "each is decompressed once"
    for file in (tmp_path / name).glob("shard*"):
        file.with_suffix("").write_bytes(unpack(file.read_bytes()))
    assert fingerprints == 2 * [open_tokens(asked).fingerprint]
