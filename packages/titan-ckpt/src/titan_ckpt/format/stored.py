"""Data classes for the contents of a manifest; file names, name prefixes and checksums. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_ckpt.format.dtypes import ITEM_BYTES
from titan_ckpt.format.layout import Layout, Piece

NAME = "checkpoint.json"
UNFINISHED = "unfinished"
"""Name of a file that exists while a checkpoint is being written or removed. Data with neither a manifest nor this file is
not left over from an interrupted save, and is never removed."""
FORMAT = 4
TOKENIZER = "tokenizer"
"""Name of the folder of the tokenizer's files."""
DATA_FILE = re.compile(r"data-[0-9]{5,}\.bin")
"""Names of the files with the data of tensors."""
TEMPLATES = "additional_chat_templates"
"""Folder of further templates, in that of the tokenizer."""
MOST_FILES = 64
"""Most files of a tokenizer."""
MODEL, OPTIMIZER, OBSERVERS = "model", "optimizer", "observers"
"""Prefixes of tensor names."""


def data_file(number: int) -> str:
    """Return the name of the data file of a rank."""
    return f"data-{number:05d}.bin"


def is_file_name(name: str) -> bool:
    """Whether a file of a tokenizer may have this name: no path leads out of the folder, and any file system accepts it."""
    last = name.removeprefix(f"{TEMPLATES}/")
    return last not in ("", ".", "..") and not set("/\\\0") & set(last) and len(last.encode()) <= 200 and last.isprintable()


def is_own_file(name: str) -> bool:
    """Whether ``name`` is one of what a checkpoint consists of, so that removing the checkpoint removes it."""
    return name.removesuffix(".new") in (NAME, UNFINISHED, TOKENIZER) or DATA_FILE.fullmatch(name) is not None


def of_replica(replica: int) -> str:
    """Return the prefix of a diverging replica's tensor names; the first replica has none."""
    return f"replica-{replica}." if replica else ""


class BrokenCheckpoint(Exception):
    """A checkpoint cannot be used."""


class IncompleteCheckpoint(BrokenCheckpoint):
    """The manifest is missing."""


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor, and the location of its bytes."""

    offset: tuple[int, ...]
    """Index, in the whole tensor, of the chunk's first element."""
    shape: tuple[int, ...]
    file: str
    start: int
    """Offset of the first byte in the file."""
    num_bytes: int
    sha256: str
    """:func:`chunk_digest` of its place and its bytes."""


class DataFile(NamedTuple):
    """The size of a data file, and of the index at its end (:mod:`titan_ckpt.format.index`)."""

    num_bytes: int
    """Of the tensors' pieces."""
    index_bytes: int
    sha256: str
    """Of the index."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, divided into pieces."""

    dtype: str
    """Name of the dtype without ``torch.``, e.g. ``"float32"``."""
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.layout.shape

    def bytes_of(self, piece: Piece) -> int:
        """Return the size of a piece."""
        return math.prod(piece.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """The contents of ``checkpoint.json``."""

    step: int
    created: str
    """UTC, ISO 8601."""
    about: Mapping[str, Any]
    """Model, mesh, resolved config, plugins and versions, for display and for checks."""
    state: Mapping[str, Any]
    """State that is not a tensor; empty if only weights were saved."""
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, DataFile]
    """The data files, by name."""
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the tokenizer, by name (:mod:`titan_ckpt.format.tokenizer_files`)."""
    indexes: dict[str, Mapping[str, tuple[int, str]]] = field(default_factory=dict, compare=False, repr=False)
    """The indexes of data files that were read with whole tensors, which need them again and again."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def diverging_replicas(self) -> int:
        """Number of replicas of the model with separate weights (local SGD); 1 for other jobs."""
        return int(self.about.get("diverging_replicas", 1))

    @property
    def model_only(self) -> bool:
        """Whether the checkpoint contains only weights, so that no run can resume from it."""
        return not self.state


def chunk_digest(tensor: str, dtype: str, offset: tuple[int, ...], shape: tuple[int, ...], data: bytes | memoryview) -> str:
    """Return the SHA-256 of a chunk. It also covers the tensor's name, the dtype, offset and shape, so that a chunk cannot
    pass for one of another tensor or position."""
    digest = hashlib.sha256(json.dumps([tensor, dtype, offset, shape]).encode())
    digest.update(data)
    return digest.hexdigest()


def tensors_in(value: Any) -> list[str]:
    """Return the names of the tensors that encoded values (:mod:`titan_ckpt.contents.plain_values`) refer to."""
    if isinstance(value, dict) and "$stored" in value:
        return [str(value["$stored"])]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [name for item in inside for name in tensors_in(item)]
