"""Files of token ids without an index: what their headers say, and the tokens in them.

* raw ids (nanoGPT's ``.bin``, OLMo's ``.npy``), whose type the recipe names;
* an array that ``numpy.save`` wrote (``numpy.lib.format``);
* llm.c's: 256 int32, of which the first three are a magic number, the version and the number of tokens
  (``dev/data/data_common.py``), and then the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy

from titan_core.api import UserError
from titan_core.toolkit.files import open_file

ENDINGS: Final = (".bin", ".npy")
_NUMPY_MAGIC: Final = b"\x93NUMPY"
_LLM_C: Final = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Version and type of the ids, by magic number: for the tokenizers of GPT-2 and of Llama 3."""
_LLM_C_HEADER: Final = 1024
_COPY = "copy the file again, or make it again"


@dataclass(frozen=True)
class FlatFile:
    """A file whose header, if any, has been read."""

    path: Path
    dtype: str
    skip: int
    """Number of bytes before the first id."""
    tokens: int


def read_header(file: Path, dtype: str, dtype_key: str) -> FlatFile:
    """Return what ``file`` contains.

    Args:
        dtype: type of the ids if there is no header, or ``auto``.
        dtype_key: config key of ``dtype``, for errors.

    Raises:
        UserError: it is damaged, of an unknown version, contains other than integers, or does not record its type.
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    with open_file(file) as stream:
        head = stream.read(_LLM_C_HEADER)
    if head.startswith(_NUMPY_MAGIC):
        return _of_numpy(file, size)
    magic, version, tokens = (int(number) for number in numpy.frombuffer(head.ljust(12, b"\0")[:12], "<i4"))
    if magic in _LLM_C and len(head) == _LLM_C_HEADER:
        known, found = _LLM_C[magic]
        if version != known:
            why = f"has version {version} of llm.c's format, but this titan-data reads version {known}"
            raise UserError.one(str(file), why, "make the file again")
        return _complete(FlatFile(file, found, _LLM_C_HEADER, tokens), size)
    if dtype == "auto":
        why = "has no header that records the type of its ids"
        raise UserError.one(str(file), why, f'set {dtype_key}, such as "uint16" (nanoGPT) or "uint32"')
    item = numpy.dtype(dtype).itemsize
    if size % item:
        raise UserError.one(str(file), f"its size ({size:,} bytes) is not a multiple of {dtype}", f"set {dtype_key}")
    return FlatFile(file, numpy.dtype(dtype).newbyteorder("<").str, 0, size // item)


def _of_numpy(file: Path, size: int) -> FlatFile:
    with open_file(file) as stream:
        try:
            version = numpy.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version} of the format is not known")
            read = numpy.lib.format.read_array_header_1_0 if version == (1, 0) else numpy.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
        except ValueError as error:
            raise UserError.one(str(file), f"its header cannot be read: {error}", "save it with numpy.save again") from None
        skip = stream.tell()
    if dtype.kind not in "iu" or len(shape) != 1:
        why = f"is an array {list(shape)} of {dtype}, and not one row of integers"
        raise UserError.one(str(file), why, "save the token ids as an array of one dimension")
    return _complete(FlatFile(file, dtype.str, skip, int(shape[0])), size)


def _complete(file: FlatFile, size: int) -> FlatFile:
    expected = file.skip + file.tokens * numpy.dtype(file.dtype).itemsize
    if size != expected:
        why = f"has {size:,} bytes, but its header says {file.tokens:,} tokens, which take {expected:,}"
        raise UserError.one(str(file.path), why, _COPY)
    return file


def describe_files(files: Sequence[FlatFile]) -> str:
    """Return how many files have which header."""
    raw = sum(file.skip == 0 for file in files)
    return f"{len(files)} files, {raw} of them without a header" if raw else f"{len(files)} files with headers"
