"""Writes a tokenised dataset (:mod:`titan_data.tokenized`) as a pair of files of Megatron-LM
(:mod:`titan_data.foreign.megatron`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import UserError
from titan_core.toolkit.atomic_write import atomic_write
from titan_data.foreign.megatron import HEADER, MAGIC, VERSION
from titan_data.mapped_files import mapped
from titan_data.tokenized import ENDS, TokenizedIndex, read_index

_CODES: Final = {"<u2": (8, "<u2"), "<u4": (4, "<i4")}
"""Code and type of Megatron's ids, by the type of ours: it has no uint32."""
_CHUNK = 1 << 20
"""Number of documents, and of tokens, that are converted at a time."""


def export_megatron(folder: Path, prefix: Path) -> tuple[int, int]:
    """Write the dataset in ``folder`` to ``PREFIX.bin`` and ``PREFIX.idx``, each document as one sequence, in order; return
    the numbers of documents and tokens. Needs memory for a million documents, however many there are.

    Raises:
        UserError: the dataset is damaged, a document has more tokens than Megatron can count, or a file exists or cannot be
            written.
    """
    index = read_index(folder)
    # Appended, because a prefix may have a dot: Path.with_suffix would replace what follows it.
    data, bounds = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for file in (data, bounds):
        if file.exists():
            raise UserError.one(str(file), "exists already", "name another --output, or remove it")
    code, dtype = _CODES[index.dtype]
    documents = sum(part.documents for part in index.parts)
    for _ in _lengths(folder, index):  # before anything is written
        pass
    try:
        with atomic_write(data) as partial, partial.open("wb") as stream:
            for part in index.parts:
                tokens = mapped(folder / f"{part.name}.bin", index.dtype)
                for at in range(0, len(tokens), _CHUNK):
                    stream.write(tokens[at : at + _CHUNK].astype(dtype).tobytes())
        with atomic_write(bounds) as partial, partial.open("wb") as stream:  # last: without it, the pair is not complete
            stream.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
            for lengths in _lengths(folder, index):
                stream.write(lengths.astype("<i4").tobytes())
            first, item = 0, numpy.dtype(dtype).itemsize
            for lengths in _lengths(folder, index):
                ends = first + lengths.cumsum() * item
                stream.write(numpy.concatenate([[first], ends[:-1]]).astype("<i8").tobytes())
                first = int(ends[-1])
            for at in range(0, documents + 1, _CHUNK):
                stream.write(numpy.arange(at, min(at + _CHUNK, documents + 1), dtype="<i8").tobytes())
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        raise UserError.one(str(prefix), why, "free disk space, or name another --output") from error
    return documents, sum(part.tokens for part in index.parts)


def _lengths(folder: Path, index: TokenizedIndex) -> Iterator[NDArray[Any]]:
    """Yield the lengths of all documents, some at a time.

    Raises:
        UserError: they are no lengths, or do not fit Megatron's int32.
    """
    for part in index.parts:
        file = folder / f"{part.name}.idx"
        ends, before = mapped(file, ENDS.str), 0
        for at in range(0, len(ends), _CHUNK):
            upto = ends[at : at + _CHUNK]
            lengths = numpy.diff(upto, prepend=before)
            if lengths.min() < 0 or (at + len(upto) == len(ends) and upto[-1] != part.tokens):
                raise UserError.one(str(file), "the index is damaged", "tokenise the dataset again")
            if lengths.max() >= 2**31:
                document = at + int(lengths.argmax())
                why = f"document {document} has {lengths.max():,} tokens, and Megatron counts them in 32 bits"
                raise UserError.one(str(file), why, "divide it, and tokenise the dataset again")
            before = int(upto[-1])
            yield lengths
