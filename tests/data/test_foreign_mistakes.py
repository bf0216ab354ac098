"""Token ids of other tools that are not understood are refused with the reason."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from harness.foreign_tokens import END, HEADER, UINT16, context, copied, llm_c, patched, problems
from titan_core.api import DatasetContext
from titan_data.foreign.config import FlatTokensSection

pytestmark = pytest.mark.usefixtures("cache_folder")


ENDED = numpy.array([1, 2, END], numpy.uint16).tobytes()

MEGATRON: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no data": (lambda idx, data: data.unlink(), ".bin: is missing beside its index"),
    "another file": (lambda idx, data: idx.write_bytes(b"hello"), "is not an index of Megatron-LM"),
    "older": (lambda idx, data: patched(idx, 0, b"TNTIDX\0\0"), "older TNTIDX format"),
    "version": (lambda idx, data: patched(idx, 9, b"\x02"), "has version 2, but this titan-data reads"),
    "floats": (lambda idx, data: patched(idx, 17, b"\x07"), "has code 7 (floats), not 1, 2, 3, 4, 5, 8"),
    "unknown": (lambda idx, data: patched(idx, 17, b"\x63"), "has code 99 (unknown), not 1, 2"),
    "images": (lambda idx, data: idx.write_bytes(idx.read_bytes() + bytes(12)), "the dataset is multimodal"),
    "short index": (lambda idx, data: idx.write_bytes(idx.read_bytes()[:-1]), "has 281 bytes, but 12 sequences and 13"),
    "short data": (
        lambda idx, data: data.write_bytes(data.read_bytes()[:-2]),
        "has 2,386 bytes, but the index ends at byte 2,388",
    ),
    "a length": (lambda idx, data: patched(idx, 34, struct.pack("<i", -5)), "at document 0: it lies outside of the data"),
    "a bound": (lambda idx, data: patched(idx, 34 + 12 * 12, struct.pack("<q", 99)), "damaged at document 0"),
}
"""Changes of a dataset's index or data, and the words of the error."""

DATATROVE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no index": (lambda file, index: index.unlink(), "has no .index file beside it"),
    "short": (lambda file, index: file.write_bytes(file.read_bytes()[:-1]), "has 4,775 bytes, but its index ends at token"),
    "short index": (lambda file, index: index.write_bytes(b"123"), "3 bytes) is not a multiple of 8"),
    "short losses": (lambda file, index: Path(f"{file}.loss").write_bytes(b"1"), "has 1 bytes, but there are 1,194"),
    "an end": (
        lambda file, index: patched(index, 0, struct.pack("<Q", 10**9)),
        "document 0 begins at token 0 and ends at 1,000,000,000 of 1,194: damaged",
    ),
}


def in_bin(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "a.bin").write_bytes(content)


def saved_as(array: Any, missing: int = 0) -> Callable[[Path], object]:
    """Save an array without its last ``missing`` bytes."""

    def make(folder: Path) -> None:
        numpy.save(folder / "a.npy", array, allow_pickle=True)
        content = (folder / "a.npy").read_bytes()
        (folder / "a.npy").write_bytes(content[: len(content) - missing])

    return make


FLAT: dict[str, tuple[Callable[[Path], object], FlatTokensSection, str]] = {
    "nothing there": (lambda folder: None, UINT16, "the folder contains no file that ends in .bin or .npy"),
    "empty": (in_bin(b""), UINT16, "the dataset contains no documents"),
    "no type": (in_bin(ENDED), FlatTokensSection(end_token_id=END), 'set flat_tokens.dtype, such as "uint16"'),
    "no end": (in_bin(ENDED), FlatTokensSection(dtype="uint16"), "do not record which token ends a document; set"),
    "another end": (
        in_bin(ENDED),
        FlatTokensSection(dtype="uint16", end_token_id=50256),
        "in its first 3 tokens: none of them is 50256; correct flat_tokens.end_token_id",
    ),
    "another type": (in_bin(ENDED), FlatTokensSection(dtype="uint32", end_token_id=END), "is not a multiple of uint32"),
    "megatron's": (lambda folder: copied(folder, "megatron_uint16"), UINT16, "has an index of Megatron-LM beside it"),
    "two dimensions": (saved_as(numpy.zeros((2, 3), numpy.int32)), HEADER, "an array [2, 3] of int32, and not one row of"),
    "floats": (saved_as(numpy.zeros(3)), HEADER, "is an array [3] of float64, and not one row of integers"),
    "objects, which are not unpickled": (saved_as(numpy.array([print], object)), HEADER, "is an array [1] of object"),
    "a short array": (saved_as(numpy.zeros(3, numpy.int32), missing=4), HEADER, "136 bytes, but its header says 3 tokens,"),
    "llm.c's version": (lambda folder: llm_c(folder, version=2), HEADER, "has version 2 of llm.c's format"),
}


def require_refused(asked: DatasetContext[Any], message: str) -> None:
    (problem,) = problems(asked)
    assert message in problem


@pytest.mark.parametrize("mistake", MEGATRON)
def test_what_is_no_dataset_of_megatron_is_refused(mistake: str, tmp_path: Path) -> None:
    change, message = MEGATRON[mistake]
    prefix = copied(tmp_path, "megatron_uint16")
    change(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    require_refused(context("megatron", prefix, None), message)


@pytest.mark.parametrize("mistake", DATATROVE)
def test_what_is_no_dataset_of_datatrove_is_refused(mistake: str, tmp_path: Path) -> None:
    change, message = DATATROVE[mistake]
    copied(tmp_path, "datatrove_uint32.ds")
    change(tmp_path / "datatrove_uint32.ds", tmp_path / "datatrove_uint32.ds.index")
    require_refused(context("datatrove", tmp_path, None), message)


@pytest.mark.parametrize("mistake", FLAT)
def test_what_are_no_flat_tokens_is_refused(mistake: str, tmp_path: Path) -> None:
    make, section, message = FLAT[mistake]
    make(tmp_path)
    require_refused(context("flat_tokens", tmp_path, section), message)


def test_a_path_without_a_dataset_is_refused(tmp_path: Path) -> None:
    require_refused(context("megatron", tmp_path / "a", None), "a.idx: no such file; set training.dataset_path to the path")
    require_refused(context("datatrove", tmp_path, None), "contains no file that ends in .ds; name a .ds file, a glob, or")
