"""Converting chunks of tensors to bytes and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_ckpt.format.folder import Folder
from titan_ckpt.format.index import located, read_index
from titan_ckpt.format.manifest import check_chunk
from titan_ckpt.format.stored import MODEL, BrokenCheckpoint, Chunk, Manifest, StoredTensor, data_file, of_replica
from titan_core.api import UserError


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
        for piece in stored.layout.pieces():
            file = data_file(piece.file)
            if file not in manifest.indexes:
                manifest.indexes[file] = read_index(folder, file, manifest.files[file])
            box = tuple(slice(first, first + size) for first, size in zip(piece.offset, piece.shape, strict=True))
            chunk = located(manifest.indexes[file], name, stored, piece)
            whole[box] = read_chunk(folder, name, stored, chunk)
    except BrokenCheckpoint as error:
        raise UserError.one(str(folder), str(error), "use another checkpoint") from None
    return whole


def require_equal_weights(folder: Folder, manifest: Manifest) -> None:
    """Require that all replicas in a checkpoint have the same weights, so that the first can represent all of them. Holds
    one weight of two replicas in memory at a time.

    Raises:
        UserError: replicas differ in a weight (the message names it), or a chunk is damaged.
    """
    if manifest.diverging_replicas == 1:
        return
    for name in manifest.tensors:
        if not name.startswith(f"{MODEL}."):
            continue
        first = read_whole(folder, manifest, name)
        for replica in range(1, manifest.diverging_replicas):
            if not torch.equal(first, read_whole(folder, manifest, of_replica(replica) + name)):
                why = f"its {manifest.diverging_replicas} replicas have different weights in {name}"
                raise UserError.one(str(folder), why, "use the checkpoint of a step that synchronised the replicas")
