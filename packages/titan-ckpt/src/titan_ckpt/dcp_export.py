"""Writing weights as a ``torch.distributed.checkpoint`` (DCP) folder, with DCP's own writer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans a save from tensors on the meta device, and reads each one only when DCP writes it."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor to write. Overrides :meth:`DefaultSavePlanner.lookup_object`."""
        return self._read(index.fqn)


def write_dcp(target: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write a DCP checkpoint of one process.

    Args:
        tensors: tensors on the meta device, by name.
        read: returns the tensor of a name, with the shape and dtype of that in ``tensors``.

    Raises:
        UserError: ``read`` did.
        OSError: ``target`` cannot be written.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            save(dict(tensors), storage_writer=FileSystemWriter(target), planner=_ReadWhenWritten(read), no_dist=True)
        except CheckpointException as error:  # contains what was raised while it wrote
            failure = next(iter(error.failures.values()))
            raise (failure[0] if isinstance(failure, tuple) else failure) from None


def described(shape: tuple[int, ...], stored: str, wanted: torch.dtype | None) -> Tensor:
    """Return a tensor on the meta device, as :func:`~titan_ckpt.dtypes.to_dtype` converts one that is ``stored`` so."""
    tensor = torch.empty(shape, dtype=getattr(torch, stored), device="meta")
    return tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor
