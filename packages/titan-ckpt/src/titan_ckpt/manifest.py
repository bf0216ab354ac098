"""What a checkpoint says of itself. Its presence is what makes a checkpoint: it is written last, when all else is durable.

A checkpoint is a folder ``step-N`` with ``data-R.bin`` of each rank, the raw bytes of chunks of tensors one after another,
and ``checkpoint.json``: which chunk is where, with its SHA-256, and the state of what is no tensor. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.folder import Folder

NAME = "checkpoint.json"
FORMAT = 1


class BrokenCheckpoint(Exception):
    """Why a checkpoint cannot be used."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes are."""

    offset: tuple[int, ...]
    """Global index of its first element."""
    shape: tuple[int, ...]
    file: str
    start: int
    """Byte of the file that it begins at."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, in chunks that together are the whole."""

    dtype: str
    """As in ``torch``, without the ``torch.``."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of ``checkpoint.json``."""

    step: int
    created: str
    """UTC, ISO 8601."""
    about: Mapping[str, Any]
    """For people, and for checks: the model, the mesh, the resolved config, plugins and versions."""
    state: Mapping[str, Any]
    """Of what is no tensor; empty where only weights were saved."""
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, int]
    """Name of each data file -> its bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.files.values())

    @property
    def model_only(self) -> bool:
        """Whether there are weights alone, which a run cannot go on from."""
        return not self.state


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
    """What the checkpoint in ``folder`` says of itself; its data files are there, and as long as they should be.

    Raises:
        BrokenCheckpoint: it is not complete, or damaged.
    """
    try:
        document = json.loads(folder.read(NAME))
        contents = document["checkpoint"]
        if document["sha256"] != _digest(_canonical(contents)):
            raise BrokenCheckpoint(f"{NAME} is damaged: its checksum does not match")
    except FileNotFoundError:
        raise BrokenCheckpoint(f"it is not complete: there is no {NAME}") from None
    except OSError as error:
        raise BrokenCheckpoint(f"{NAME} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise BrokenCheckpoint(f"{NAME} is damaged: it is no JSON of ours") from None
    if contents["format"] != FORMAT:
        raise BrokenCheckpoint(f"it has format {contents['format']}, and this titan-ckpt reads {FORMAT}")
    manifest = Manifest(
        step=contents["step"],
        created=contents["created"],
        about=contents["about"],
        state=contents["state"],
        files=contents["files"],
        tensors=dict(_tensors(contents["tensors"])),
    )
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
    by_file: dict[str, list[tuple[str, Chunk]]] = {}
    for tensor, stored in manifest.tensors.items():
        for chunk in stored.chunks:
            by_file.setdefault(chunk.file, []).append((tensor, chunk))
    for name, chunks in by_file.items():
        with folder.open(name) as file:
            for tensor, chunk in sorted(chunks, key=lambda pair: pair[1].start):
                file.seek(chunk.start)
                check_chunk(tensor, chunk, file.read(chunk.num_bytes))
                yield chunk.num_bytes


def check_chunk(tensor: str, chunk: Chunk, data: bytes | memoryview) -> None:
    """Hold bytes that were read against the chunk's checksum.

    Raises:
        BrokenCheckpoint: they differ.
    """
    if len(data) != chunk.num_bytes or hashlib.sha256(data).hexdigest() != chunk.sha256:
        raise BrokenCheckpoint(f"{chunk.file} is damaged in {tensor}: its checksum does not match")


def _tensors(contents: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    for name, tensor in contents.items():
        chunks = (
            Chunk(tuple(offset), tuple(shape), file, start, num_bytes, sha256)
            for offset, shape, file, start, num_bytes, sha256 in tensor["chunks"]
        )
        yield name, StoredTensor(tensor["dtype"], tuple(tensor["shape"]), tuple(chunks))


def _canonical(contents: Any) -> str:
    return json.dumps(contents, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
