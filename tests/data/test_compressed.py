"""Compressed data of every format is read completely, and a damaged file is refused."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from titan_core.api import CorruptRecord, DatasetContext, UserError
from titan_data.compressed import Damaged, decompress, decompressed
from titan_data.local_files import check_files
from titan_data.record_files import open_local
from titan_data.text_files import open_text

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
CONTENT = b"".join(b"%x\n" % random.Random(0).getrandbits(64) for _ in range(40))
LARGE = random.Random(1).randbytes(200_000) + bytes(3_000_000)
"""More than one compressed chunk; one chunk decompresses to more than a chunk."""


def unpacked(folder: Path, ending: str, packed: bytes) -> bytes:
    file = folder / f"data.txt{ending}"
    file.write_bytes(packed)
    return b"".join(decompress(file))


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("content", [b"", CONTENT, LARGE], ids=["empty", "small", "large"])
@pytest.mark.parametrize("ending", PACK)
def test_the_whole_content_is_read(tmp_path: Path, ending: str, content: bytes) -> None:
    assert unpacked(tmp_path, ending, PACK[ending](content)) == content


@pytest.mark.parametrize("ending", PACK)
def test_concatenated_streams_are_read_as_one_file(tmp_path: Path, ending: str) -> None:
    """``cat a.zst b.zst`` and parallel compressors write such files."""
    packed = PACK[ending](CONTENT) + PACK[ending](b"") + PACK[ending](LARGE) + PACK[ending](CONTENT)
    assert unpacked(tmp_path, ending, packed) == CONTENT + LARGE + CONTENT


def test_zstd_without_a_size_and_with_a_checksum(tmp_path: Path) -> None:
    """Compressing a pipe writes no size. Skippable frames contain no data."""
    pipe = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compressobj()
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    packed = skippable + pipe.compress(CONTENT) + pipe.flush()
    assert unpacked(tmp_path, ".zst", packed) == CONTENT
    for cut in range(len(packed) - 1, len(packed) - 10, -1):
        with pytest.raises(Damaged, match="the last zstd stream is incomplete"):
            unpacked(tmp_path, ".zst", packed[:cut])


@pytest.mark.parametrize("ending", PACK)
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, ending: str) -> None:
    first = PACK[ending](CONTENT)
    packed = first + PACK[ending](CONTENT[::-1])
    for cut in range(len(packed)):
        if cut == len(first):
            continue  # a complete file
        with pytest.raises(Damaged, match=r"the last \w+ stream is incomplete"):
            unpacked(tmp_path, ending, packed[:cut])


@pytest.mark.parametrize("garbage", [b"x", b"\n", b"garbage", b"garbage " * 10_000, b"\0\0\0\0garbage"], ids=len)
@pytest.mark.parametrize("ending", PACK)
def test_extra_data_at_the_end_is_refused(tmp_path: Path, ending: str, garbage: bytes) -> None:
    with pytest.raises(Damaged, match=r"the data after the last stream is not|has extra data at its end"):
        unpacked(tmp_path, ending, PACK[ending](CONTENT) + garbage)


@pytest.mark.parametrize("ending", PACK)
def test_trailing_zeros_are_accepted_if_the_format_allows_them(tmp_path: Path, ending: str) -> None:
    for zeros in (4, 100_000):
        packed = PACK[ending](CONTENT) + bytes(zeros)
        if ending in (".gz", ".xz"):
            assert unpacked(tmp_path, ending, packed) == CONTENT
        else:
            with pytest.raises(Damaged):
                unpacked(tmp_path, ending, packed)


@pytest.mark.parametrize("ending", PACK)
def test_flipped_bits_never_change_the_text(tmp_path: Path, ending: str) -> None:
    """Holds for formats with a checksum (optional in zstd). A flipped bit in a header may leave the data unchanged."""
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if ending == ".zst" else PACK[ending]
    packed = bytearray(pack(CONTENT))
    for place in range(0, len(packed), 3):
        packed[place] ^= 1 << place % 8
        with contextlib.suppress(Damaged):
            assert unpacked(tmp_path, ending, bytes(packed)) == CONTENT
        packed[place] ^= 1 << place % 8


def request(kind: str, path: Path) -> DatasetContext[None]:
    return DatasetContext(kind, str(path), "text", 0, "recipe: training.dataset_path", section=None)


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", ["json", "text"])
def test_compressed_datasets(tmp_path: Path, kind: str, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    lines = [json.dumps({"text": f"line {number}"}) for number in range(5)]
    path = tmp_path / f"data.{'jsonl' if kind == 'json' else 'txt'}{ending}"
    packed = PACK[ending]("\n".join(lines).encode())
    path.write_bytes(packed)
    assert check_files(request(kind, tmp_path)) == []
    open_it = open_local if kind == "json" else open_text
    texts = list(open_it(request(kind, tmp_path)).shard(0, 1, 0))
    assert sorted(texts) == ([f"line {number}" for number in range(5)] if kind == "json" else ["\n".join(lines)])
    for bad in (b"not an archive, despite its name", packed[:-1], packed + b"x"):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=rf"data\.\w+\{ending}: cannot be decompressed as .*; download it again"):
            open_it(request(kind, tmp_path))
    assert not list((tmp_path / "cache").rglob(".*.part"))


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("ending", PACK)
def test_the_first_record_of_a_compressed_file_is_checked_early(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"data.jsonl{ending}"
    for content, why in {
        b'\n \n{"body": "x"}\n' + LARGE: r":3: no field 'text' (fields: body)",
        b" \n\n": "the dataset is empty",
        b"\n{" + LARGE[:100]: r":2: not UTF-8 text",
    }.items():
        path.write_bytes(PACK[ending](content))
        (problem,) = check_files(request("json", path))
        assert why in str(problem)
    path.write_bytes(b"not an archive")
    (problem,) = check_files(request("json", path))
    assert "cannot be decompressed as" in str(problem)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_first_line_that_is_too_long_is_a_corrupt_record(tmp_path: Path, ending: str, cache_folder: Path) -> None:
    path = tmp_path / f"data.jsonl{ending}"
    lines = b'{"text": "%s"}\n{"text": "b"}\n' % (b"a" * 400)
    path.write_bytes(PACK[ending](lines) if ending else lines)
    context = replace(request("json", path), max_record_bytes=100, shuffle="none")
    (problem,) = check_files(context)
    assert str(problem).startswith(f"{path}:1: the line takes 413 bytes, more than data.max_record_bytes = 100 allows")
    assert check_files(replace(context, skip_corrupt=True)) == []
    shard = open_local(context).shard(0, 1, 0)
    with pytest.raises(CorruptRecord, match="the line takes 413 bytes"):
        next(shard)
    longer = lines.replace(b"aa", b"a" * 5)  # more than eight times as long as a record: the file may have no end
    path.write_bytes(PACK[ending](longer) if ending else longer)
    (problem,) = check_files(replace(context, skip_corrupt=True))
    assert str(problem).startswith(f"{path}:1: the line takes more than 800 bytes, and has no end yet")


def test_a_file_is_decompressed_once_for_all_that_need_it_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As ranks of one machine do. Threads hold locks of their own, as processes do."""
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    files = [tmp_path / f"{number}.txt{ending}" for number in range(5) for ending in PACK]
    for file in files:
        file.write_bytes(PACK[file.suffix](LARGE))
    with ThreadPoolExecutor(4) as ranks:
        found = list(ranks.map(decompressed, 4 * [files]))
    assert found == 4 * [found[0]] and len(caplog.messages) == len(files)
    assert all(copy.read_bytes() == LARGE for copy in found[0])
    assert not [one for one in (tmp_path / "cache" / "decompressed").iterdir() if one.name.startswith(".")]
