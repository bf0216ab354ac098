"""What a checkpoint says of itself, as data; and the names and checksums of its files. Free of torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME = "checkpoint.json"
UNFINISHED = "unfinished"
"""A file that is in the folder while a checkpoint is written or removed. Data without a manifest and without this file is
not what an interrupted save has left, and is never removed."""
FORMAT = 2
MODEL, OPTIMIZER, OBSERVERS = "model", "optimizer", "observers"
"""What the names of tensors begin with."""


def of_replica(replica: int) -> str:
    """The prefix of the tensor names of a diverging replica; the first has none."""
    return f"replica-{replica}." if replica else ""


class BrokenCheckpoint(Exception):
    """Why a checkpoint cannot be used."""


class IncompleteCheckpoint(BrokenCheckpoint):
    """There is no manifest."""


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
    """:func:`chunk_digest` of its place and its bytes."""


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
    def diverging_replicas(self) -> int:
        """Number of replicas of the model, each with weights of its own (local SGD); 1 for other jobs."""
        return int(self.about.get("diverging_replicas", 1))

    @property
    def model_only(self) -> bool:
        """Whether there are weights alone, which a run cannot resume from."""
        return not self.state


def chunk_digest(tensor: str, dtype: str, offset: tuple[int, ...], shape: tuple[int, ...], data: bytes | memoryview) -> str:
    """SHA-256 of a chunk. It covers what the bytes are, too, so that a chunk cannot pass for one of another place, tensor or
    type."""
    digest = hashlib.sha256(json.dumps([tensor, dtype, offset, shape]).encode())
    digest.update(data)
    return digest.hexdigest()


def tensors_in(value: Any) -> list[str]:
    """The names of the tensors that plain values (:mod:`titan_ckpt.plain_values`) refer to."""
    if isinstance(value, dict) and "$stored" in value:
        return [str(value["$stored"])]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [name for one in inside for name in tensors_in(one)]
