"""What a checkpoint says of itself. Its presence is what makes a checkpoint: it is written last, when all else is durable.

A checkpoint is a folder ``step-N`` with ``data-R.bin`` of each rank, the raw bytes of chunks of tensors one after another,
and ``checkpoint.json``: which chunk is where, with its SHA-256, and the state of what is no tensor. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from titan_ckpt.folder import Folder
from titan_ckpt.manifest_checks import checked_manifest
from titan_ckpt.stored import (
    FORMAT,
    NAME,
    UNFINISHED,
    BrokenCheckpoint,
    Chunk,
    IncompleteCheckpoint,
    Manifest,
    StoredTensor,
    chunk_digest,
)


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Commit the checkpoint in ``folder``."""
    contents = {
        "format": FORMAT,
        "step": manifest.step,
        "created": manifest.created,
        "about": manifest.about,
        "state": manifest.state,
        "files": manifest.files,
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "chunks": [[c.offset, c.shape, c.file, c.start, c.num_bytes, c.sha256] for c in tensor.chunks],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    text = _canonical(contents)
    folder.write(NAME, f'{{"sha256": "{_digest(text)}", "checkpoint": {text}}}\n'.encode())


def read_manifest(folder: Folder) -> Manifest:
    """What the checkpoint in ``folder`` says of itself. Every tensor is covered by its chunks, and the data files are there
    and as long as they should be.

    Raises:
        BrokenCheckpoint: it is not complete, damaged, or contradicts itself.
    """
    try:
        document = json.loads(folder.read(NAME))
        contents = document["checkpoint"]
        if document["sha256"] != _digest(_canonical(contents)):
            raise BrokenCheckpoint(f"{NAME} is damaged: its checksum does not match")
    except FileNotFoundError:
        how = "its save was interrupted" if folder.size(UNFINISHED) is not None else f"there is no {NAME}"
        raise IncompleteCheckpoint(f"it is not complete: {how}") from None
    except OSError as error:
        raise BrokenCheckpoint(f"{NAME} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BrokenCheckpoint(f"{NAME} is damaged: it is no JSON of ours") from None
    manifest = checked_manifest(contents)
    for name, expected in manifest.files.items():
        size = folder.size(name)
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes"
            raise BrokenCheckpoint(f"{name} {found}, and should have {expected} bytes")
    return manifest


def verify_data(folder: Folder, manifest: Manifest) -> Iterator[int]:
    """Hold every chunk against its checksum; yields the bytes of each.

    Raises:
        BrokenCheckpoint: at the first that does not match.
    """
    by_file: dict[str, list[tuple[str, StoredTensor, Chunk]]] = {}
    for name, stored in manifest.tensors.items():
        for chunk in stored.chunks:
            by_file.setdefault(chunk.file, []).append((name, stored, chunk))
    for file_name, chunks in by_file.items():
        with folder.open(file_name) as file:
            for name, stored, chunk in sorted(chunks, key=lambda one: one[2].start):
                file.seek(chunk.start)
                check_chunk(name, stored.dtype, chunk, file.read(chunk.num_bytes))
                yield chunk.num_bytes


def check_chunk(tensor: str, dtype: str, chunk: Chunk, data: bytes | memoryview) -> None:
    """Hold bytes that were read against the chunk's checksum.

    Raises:
        BrokenCheckpoint: they differ.
    """
    if len(data) != chunk.num_bytes or chunk_digest(tensor, dtype, chunk.offset, chunk.shape, data) != chunk.sha256:
        raise BrokenCheckpoint(f"{chunk.file} is damaged in {tensor}: its checksum does not match")


def _canonical(contents: Any) -> str:
    return json.dumps(contents, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
