"""Converting chunks of tensors to bytes and back."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_ckpt.folder import Folder
from titan_ckpt.manifest import check_chunk
from titan_ckpt.stored import BrokenCheckpoint, Chunk, Manifest, StoredTensor
from titan_core.api import UserError


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_chunk(folder: Folder, name: str, tensor: StoredTensor, chunk: Chunk) -> Tensor:
    """Read a chunk of the tensor ``name`` into newly allocated memory.

    Raises:
        BrokenCheckpoint: the checksum does not match.
    """
    with folder.open(chunk.file) as file:
        file.seek(chunk.start)
        data = bytearray(file.read(chunk.num_bytes))
    check_chunk(name, tensor.dtype, chunk, memoryview(data))
    dtype = getattr(torch, tensor.dtype)
    return torch.frombuffer(data, dtype=dtype).view(chunk.shape) if data else torch.empty(chunk.shape, dtype=dtype)


def read_whole(folder: Folder, manifest: Manifest, name: str) -> Tensor:
    """Read a whole tensor of a checkpoint.

    Raises:
        UserError: a chunk is damaged.
    """
    stored = manifest.tensors[name]
    dtype = getattr(torch, stored.dtype)
    whole = torch.empty(stored.shape, dtype=dtype)
    try:
        for chunk in stored.chunks:
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offset, chunk.shape, strict=True))
            whole[box] = read_chunk(folder, name, stored, chunk)
    except BrokenCheckpoint as error:
        raise UserError.one(str(folder), str(error), "use another checkpoint") from None
    return whole
