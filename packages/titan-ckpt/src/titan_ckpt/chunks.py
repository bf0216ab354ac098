"""A chunk of a tensor as bytes in a file, and back."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from titan_ckpt.folder import Folder
from titan_ckpt.manifest import Chunk, check_chunk


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes, in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def digest(data: memoryview) -> str:
    """What a chunk's bytes are held against when they are read."""
    return hashlib.sha256(data).hexdigest()


def read_chunk(folder: Folder, tensor: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """The chunk of ``tensor``, in memory of its own.

    Raises:
        BrokenCheckpoint: its bytes are not those that were written.
    """
    with folder.open(chunk.file) as file:
        file.seek(chunk.start)
        data = bytearray(file.read(chunk.num_bytes))
    check_chunk(tensor, chunk, memoryview(data))
    return torch.frombuffer(data, dtype=dtype).view(chunk.shape) if data else torch.empty(chunk.shape, dtype=dtype)
