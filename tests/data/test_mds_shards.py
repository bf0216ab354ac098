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


def cut(file: Path) -> dict[str, Any]:
    """Compress half of a shard; return what the index says of the file."""
    content = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(content[: len(content) // 2]))
    return {"basename": file.name, "bytes": file.stat().st_size}


def other_compression(shards: list[Any], path: Path) -> None:
    for shard in shards:
        shard.update(compression="br:11", zip_data={**shard["zip_data"], "basename": "shard.00000.mds.br"})


def no_array(shards: list[Any], path: Path) -> None:
    for shard in shards:
        shard.update(column_names=["a", "b"], column_encodings=["str", "str"])


def longer_columns(shards: list[Any], path: Path) -> None:
    file = path / "shard.00000.mds"
    patched(file, int(numpy.frombuffer(file.read_bytes(), "<u4", 1, 4)[0]), struct.pack("<I", 10**6))


DAMAGE: dict[str, tuple[str, Callable[[list[Any], Path], object], str]] = {
    "format": ("mds_int32", lambda shards, path: shards[0].update(format="json"), "has format 'json', not"),
    "another compression": ("mds_zstd", other_compression, "shard 0: is compressed (br:11), which titan-data does not read"),
    "a lost compressed shard": ("mds_zstd", lambda shards, path: (path / "shard.00001.mds.zstd").unlink(), "is missing"),
    "a damaged compressed shard": (
        "mds_gz",
        lambda shards, path: (path / "shard.00000.mds.gz").write_bytes(bytes(shards[0]["zip_data"]["bytes"])),
        "shard.00000.mds.gz: cannot be decompressed as gzip",
    ),
    "a short compressed shard": (
        "mds_zstd",
        lambda shards, path: (path / "shard.00000.mds.zstd").write_bytes(b"1234"),
        "shard.00000.mds.zstd: has 4 bytes, but index.json says 425 and 3 samples",
    ),
    "half a shard, compressed": (
        "mds_gz",
        lambda shards, path: shards[0].update(zip_data=cut(path / "shard.00000.mds.gz")),
        "shard.00000.mds.gz, sample 1: damaged: it lies at bytes",
    ),
    "a lost shard": ("mds_int32", lambda shards, path: (path / "shard.00001.mds").unlink(), "shard.00001.mds: is missing"),
    "a short shard": ("mds_int32", lambda shards, path: (path / "shard.00001.mds").write_bytes(b""), "has 0 bytes, but"),
    "elsewhere": (
        "mds_int32",
        lambda shards, path: shards[0]["raw_data"].update(basename="../x.mds"),
        "names the file '../x.mds', which is not in the folder",
    ),
    "fewer than no samples": (
        "mds_int32",
        lambda shards, path: shards[0].update(samples=-5),
        "shard 0: damaged: ValueError samples is -5",
    ),
    "no list": ("mds_int32", lambda shards, path: shards.insert(0, 5), "shard 0: damaged: TypeE"),
    "no type": ("mds_bytes", lambda shards, path: None, "plain bytes, which do not record the type"),
    "no array": ("mds_int32", no_array, "has no column that may be token ids"),
    "a sample": (
        "mds_int32",
        lambda shards, path: patched(path / "shard.00000.mds", 4, struct.pack("<I", 5)),
        "shard.00000.mds, sample 0: damaged: it lies at bytes 5 to",
    ),
    "a size": ("mds_int32", longer_columns, "damaged: its columns are longer than the sample"),
}
"""Fixtures, changes of their index's shards or of their files, and the words of the error."""


def require_refused(path: Path, message: str, column: str = "") -> None:
    (problem,) = problems(context("mds", path, MdsSection(column=column)))
    assert message in problem


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(damage: str, tmp_path: Path) -> None:
    name, change, message = DAMAGE[damage]
    path = copied(tmp_path, name)
    index = json.loads((path / "index.json").read_text())
    change(index["shards"], path)
    (path / "index.json").write_text(json.dumps(index))
    require_refused(path, message)


def test_other_folders_versions_and_columns_are_refused(tmp_path: Path) -> None:
    require_refused(tmp_path, "contains no index.json; name the folder that")
    path = copied(tmp_path, "mds_int32")
    require_refused(tmp_path, "index.json; name one of its folders: mds_int32")
    require_refused(
        path, "column 'source' is encoded as 'str', and not as an array of integers (columns: source (str)", "source"
    )
    require_refused(path, "has no column 'ids' (columns: source (str), tokens", "ids")
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps(index | {"version": 3}))
    require_refused(path, "has version 3, but this")


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
