"""The index at the end of a data file: where the file has its piece of each tensor, and the piece's checksum. The rank that
writes the file writes its index; the manifest has the index's checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import IO

from titan_ckpt.format.folder import Folder, write_all
from titan_ckpt.format.layout import Piece
from titan_ckpt.format.stored import BrokenCheckpoint, Chunk, DataFile, Manifest, StoredTensor, data_file
from titan_core.toolkit.plain_json import plain_json

Index = Mapping[str, tuple[int, str]]
"""Start in the file and :func:`~titan_ckpt.format.stored.chunk_digest` of the piece of each tensor, by its name."""


def write_index(file: IO[bytes], index: Index, num_bytes: int) -> DataFile:
    """Append the index to a file with ``num_bytes`` of data."""
    text = json.dumps(index, separators=(",", ":")).encode()
    write_all(file, memoryview(text))
    return DataFile(num_bytes, len(text), hashlib.sha256(text).hexdigest())


def read_index(folder: Folder, name: str, expected: DataFile) -> Index:
    """Return the index of the data file ``name``.

    Raises:
        BrokenCheckpoint: it is damaged.
    """
    with folder.open(name) as file:
        file.seek(expected.num_bytes)
        text = file.read(expected.index_bytes)
    if hashlib.sha256(text).hexdigest() != expected.sha256:
        raise BrokenCheckpoint(f"{name} is damaged in its index: its checksum does not match")
    try:
        found = {tensor: (start, sha256) for tensor, (start, sha256) in plain_json(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise BrokenCheckpoint(f"{name} is damaged: its index is not the JSON of one") from None
    if not all(type(start) is int and 0 <= start < 2**63 and type(sha256) is str for start, sha256 in found.values()):
        raise BrokenCheckpoint(f"{name} is damaged: its index has values of the wrong type")
    return found


def located(index: Index, tensor: str, stored: StoredTensor, piece: Piece) -> Chunk:
    """Return a piece with its place in its file.

    Raises:
        BrokenCheckpoint: the file's index does not have it.
    """
    file = data_file(piece.file)
    if tensor not in index:
        raise BrokenCheckpoint(f"{file} should have a piece of {tensor}, which its index does not list")
    start, sha256 = index[tensor]
    return Chunk(piece.offset, piece.shape, file, start, stored.bytes_of(piece), sha256)


def chunks_by_file(folder: Folder, manifest: Manifest) -> Iterator[tuple[str, list[tuple[str, StoredTensor, Chunk]]]]:
    """Yield each data file with its pieces, in the order of their bytes.

    Raises:
        BrokenCheckpoint: a byte of the file belongs to no piece or to several, or its index has other tensors than the
            manifest.
    """
    of_files: dict[str, list[tuple[str, StoredTensor, Piece]]] = {name: [] for name in manifest.files}
    for name, stored in manifest.tensors.items():
        for piece in stored.layout.pieces():
            of_files[data_file(piece.file)].append((name, stored, piece))
    for file, pieces in of_files.items():
        expected = manifest.files[file]
        index = read_index(folder, file, expected)
        chunks = [(name, stored, located(index, name, stored, piece)) for name, stored, piece in pieces]
        if len(index) != len(chunks):
            raise BrokenCheckpoint(f"{file} has pieces of other tensors than {len(chunks)} that the manifest lists")
        chunks.sort(key=lambda entry: (entry[2].start, entry[2].num_bytes))
        spans = [(0, 0), *((c.start, c.start + c.num_bytes) for _, _, c in chunks), (expected.num_bytes, 0)]
        for (_, end), (start, _) in pairwise(spans):
            if start != end:
                owners = "several pieces" if start < end else "no piece"
                raise BrokenCheckpoint(f"{file} has bytes that belong to {owners}, from byte {min(start, end)} on")
        yield file, chunks
