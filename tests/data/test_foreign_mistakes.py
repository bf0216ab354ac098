"""Token ids of other tools that are not understood are refused with the reason."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from harness.foreign_tokens import END, HEADER, UINT16, context, copied, llm_c, patched, problems
from titan_data.foreign.config import FlatTokensSection

pytestmark = pytest.mark.usefixtures("cache_folder")


def bad_megatron(change: Callable[[Path, Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        prefix = copied(folder, "megatron_uint16")
        change(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
        return prefix

    return make


def bad_datatrove(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        copied(folder, "datatrove_uint32.ds")
        change(folder / "datatrove_uint32.ds")
        return folder

    return make


def flat(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder

    return make


def saved_as(array: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        numpy.save(folder / "a.npy", array)
        return folder

    return make


ENDED = numpy.array([1, 2, END], numpy.uint16).tobytes()
MISTAKES: dict[str, tuple[str, Callable[[Path], Path], Any, str]] = {
    "megatron: nothing there": (
        "megatron",
        lambda folder: folder / "a",
        None,
        "a.idx: no such file; set training.dataset_path to the path",
    ),
    "megatron: no data": (
        "megatron",
        bad_megatron(lambda idx, data: data.unlink()),
        None,
        ".bin: is missing beside its index",
    ),
    "megatron: another file": (
        "megatron",
        bad_megatron(lambda idx, data: idx.write_bytes(b"hello")),
        None,
        "is not an index of Megatron-LM",
    ),
    "megatron: older": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 0, b"TNTIDX\0\0")),
        None,
        "older TNTIDX format",
    ),
    "megatron: version": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 9, b"\x02")),
        None,
        "has version 2, but this titan-data reads",
    ),
    "megatron: floats": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 17, b"\x07")),
        None,
        "has code 7 (floats), not 1, 2, 3, 4, 5, 8",
    ),
    "megatron: unknown": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 17, b"\x63")),
        None,
        "has code 99 (unknown), not 1, 2",
    ),
    "megatron: images": (
        "megatron",
        bad_megatron(lambda idx, data: idx.write_bytes(idx.read_bytes() + bytes(12))),
        None,
        "has a mode for each sequence: the dataset is multimodal",
    ),
    "megatron: short index": (
        "megatron",
        bad_megatron(lambda idx, data: idx.write_bytes(idx.read_bytes()[:-1])),
        None,
        "has 281 bytes, but 12 sequences and 13 document bounds take 282",
    ),
    "megatron: short data": (
        "megatron",
        bad_megatron(lambda idx, data: data.write_bytes(data.read_bytes()[:-2])),
        None,
        "has 2,386 bytes, but the index ends at byte 2,388",
    ),
    "megatron: a length": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 34, struct.pack("<i", -5))),
        None,
        "damaged at document 0: it lies outside of the data",
    ),
    "megatron: a bound": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 34 + 12 * 12, struct.pack("<q", 99))),
        None,
        "damaged at document 0",
    ),
    "datatrove: nothing there": (
        "datatrove",
        lambda folder: folder,
        None,
        "the folder contains no file that ends in .ds; name a .ds file, a glob, or",
    ),
    "datatrove: no index": (
        "datatrove",
        bad_datatrove(lambda file: Path(f"{file}.index").unlink()),
        None,
        "has no .index file beside it",
    ),
    "datatrove: short": (
        "datatrove",
        bad_datatrove(lambda file: file.write_bytes(file.read_bytes()[:-1])),
        None,
        "has 4,775 bytes, but its index ends at token 1,194, of 2 or 4 bytes",
    ),
    "datatrove: short index": (
        "datatrove",
        bad_datatrove(lambda file: Path(f"{file}.index").write_bytes(b"123")),
        None,
        "3 bytes) is not a multiple of 8",
    ),
    "datatrove: short losses": (
        "datatrove",
        bad_datatrove(lambda file: Path(f"{file}.loss").write_bytes(b"1")),
        None,
        "has 1 bytes, but there are 1,194",
    ),
    "datatrove: an end": (
        "datatrove",
        bad_datatrove(lambda file: patched(Path(f"{file}.index"), 0, struct.pack("<Q", 10**9))),
        None,
        "document 0 begins at token 0 and ends at 1,000,000,000 of 1,194: damaged",
    ),
    "flat: nothing there": (
        "flat_tokens",
        lambda folder: folder,
        UINT16,
        "the folder contains no file that ends in .bin or .npy",
    ),
    "flat: empty": ("flat_tokens", flat("a.bin", b""), UINT16, "the dataset contains no documents"),
    "flat: no type": (
        "flat_tokens",
        flat("a.bin", ENDED),
        FlatTokensSection(end_token_id=END),
        'no header that records the type of its ids; set flat_tokens.dtype, such as "uint16"',
    ),
    "flat: no end": (
        "flat_tokens",
        flat("a.bin", ENDED),
        FlatTokensSection(dtype="uint16"),
        "do not record which token ends a document; set",
    ),
    "flat: another end": (
        "flat_tokens",
        flat("a.bin", ENDED),
        FlatTokensSection(dtype="uint16", end_token_id=50256),
        "no document ends in its first 3 tokens: none of them is 50256; correct flat_tokens.end_token_id",
    ),
    "flat: another type": (
        "flat_tokens",
        flat("a.bin", ENDED),
        FlatTokensSection(dtype="uint32", end_token_id=END),
        "is not a multiple of uint32",
    ),
    "flat: megatron's": (
        "flat_tokens",
        lambda folder: copied(folder, "megatron_uint16").parent,
        UINT16,
        "has an index of Megatron-LM beside it",
    ),
    "flat: two dimensions": (
        "flat_tokens",
        saved_as(numpy.zeros((2, 3), numpy.int32)),
        HEADER,
        "is an array [2, 3] of int32, and not one row of",
    ),
    "flat: floats": (
        "flat_tokens",
        saved_as(numpy.zeros(3)),
        HEADER,
        "is an array [3] of float64, and not one row of integers",
    ),
    "flat: a short array": (
        "flat_tokens",
        lambda folder: flat("a.npy", (saved_as(numpy.zeros(3, numpy.int32))(folder) / "a.npy").read_bytes()[:-4])(folder),
        HEADER,
        "has 136 bytes, but its header says 3 tokens, which take 140",
    ),
    "flat: llm.c's version": (
        "flat_tokens",
        lambda folder: llm_c(folder, version=2),
        HEADER,
        "has version 2 of llm.c's format",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_understood_is_refused(mistake: str, tmp_path: Path) -> None:
    name, make, section, message = MISTAKES[mistake]
    asked = context(name, make(tmp_path), section)
    (problem,) = problems(asked)
    assert message in problem


def test_an_array_with_objects_is_not_unpickled(tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.array([print], object), allow_pickle=True)
    assert "is an array [1] of object" in problems(context("flat_tokens", tmp_path, HEADER))[0]
