"""The files of foreign weights (Hugging Face's safetensors and Meta's ``consolidated.*.pth``), read a part of a tensor at a
time."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from titan_ckpt.foreign.config import DOWNLOAD_AGAIN, HF_INDEX, require_shards, weight_map
from titan_ckpt.format.dtypes import dtype_name
from titan_core.api import UserError
from titan_core.toolkit.files import regular

log = logging.getLogger(__name__)

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Names in ``torch`` of the dtypes of safetensors files. Others, of quantised weights, keep their name in safetensors."""


Box: TypeAlias = tuple[slice, ...]


class ForeignFiles(Protocol):
    """A folder of foreign weights."""

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str, split: int | None = None) -> tuple[int, ...]:
        """Return the shape of the whole tensor ``name``. ``split``: see :class:`~titan_core.api.ForeignTensor`."""
        ...

    def dtype(self, name: str) -> str:
        """Return the dtype that a tensor is stored in, by its name in ``torch`` if :data:`~titan_ckpt.format.dtypes.FLOATS`
        has it."""
        ...

    def read(self, name: str, box: Box, split: int | None = None) -> Tensor:
        """Read the part of the tensor ``name`` in ``box``, which has a range of indices for each of its dimensions."""
        ...


def open_files(folder: Path, kind: str) -> ForeignFiles:
    """Open the Hugging Face or Meta weights in ``folder``.

    Raises:
        UserError: files are missing, damaged or inconsistent.
    """
    readers: dict[str, Callable[[Path], ForeignFiles]] = {"safetensors": SafetensorsFiles, "consolidated": MetaFiles}
    return readers[kind](folder)


class SafetensorsFiles:
    """A single ``.safetensors`` file, or several with an index."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / HF_INDEX
        require_shards(folder)
        listed = weight_map(index) if index.exists() else None
        present = sorted(path.name for path in folder.glob("*.safetensors"))
        found = present if listed is None else sorted(set(listed.values()))
        if unread := [name for name in present if name not in found]:
            # Some publishers include the weights twice, once in a layout of their own.
            log.warning("%s is not read, because %s does not list it", ", ".join(unread), index)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for file in found:
            try:
                self._files[file] = safe_open(regular(folder / file, inside=folder), framework="pt")
                names = list(self._files[file].keys())
            except (SafetensorError, OSError) as error:
                raise UserError.one(str(folder / file), f"cannot be read: {error}", DOWNLOAD_AGAIN) from None
            for name in names:
                if name in self._file_of:
                    why = f"contains tensor {name}, which {self._file_of[name]} contains too"
                    raise UserError.one(str(folder / file), why, "keep the files of only one model in a folder")
                self._file_of[name] = file
        if listed is not None and listed != self._file_of:
            name = min(name for name in {*listed, *self._file_of} if listed.get(name) != self._file_of.get(name))
            said, actual = (files.get(name, "no file") for files in (listed, self._file_of))
            why = f"lists tensor {name} in {said}, but it is in {actual}"
            raise UserError.one(str(index), why, "download the whole folder again")

    def names(self) -> set[str]:
        """See :class:`ForeignFiles`."""
        return set(self._file_of)

    def shape(self, name: str, split: int | None = None) -> tuple[int, ...]:
        """See :class:`ForeignFiles`."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """See :class:`ForeignFiles`."""
        stored = str(self._slice(name).get_dtype())
        return _DTYPES.get(stored, stored)

    def read(self, name: str, box: Box, split: int | None = None) -> Tensor:
        """See :class:`ForeignFiles`."""
        part = self._slice(name)[box] if box else self._files[self._file_of[name]].get_tensor(name)
        assert isinstance(part, Tensor)
        return part

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)


class MetaFiles:
    """Files ``consolidated.00.pth`` and so on, each with a part of every tensor. They are memory-mapped, so that only the
    requested rows are read, and unpickled with ``weights_only=True``, so that no code in them runs."""

    def __init__(self, folder: Path) -> None:
        self._shards: list[Mapping[str, Tensor]] = []
        for file in sorted(folder.glob("consolidated.*.pth")):
            try:
                shard = torch.load(regular(file, inside=folder), map_location="cpu", mmap=True, weights_only=True)
            except pickle.UnpicklingError as error:  # whose message says how to run the code in it
                why = "is damaged, or contains other objects than tensors, which could run code"
                raise UserError.one(str(file), why, f"{DOWNLOAD_AGAIN}, or convert it to safetensors") from error
            except Exception as error:
                why = f"cannot be read: {' '.join(str(error).split())[:200]}"
                raise UserError.one(str(file), why, DOWNLOAD_AGAIN) from error
            if not isinstance(shard, dict) or not all(
                isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in shard.items()
            ):
                raise UserError.one(str(file), "must contain only tensors by name", "are these Meta's weights?")
            self._shards.append(shard)
            different = {name for name, tensor in shard.items() if not _same_layout(tensor, self._shards[0].get(name))}
            different |= self._shards[0].keys() - shard.keys()
            if different:
                why = f"tensor {min(different)} is missing here or in the first file, or differs in shape or dtype"
                raise UserError.one(str(file), why, "download the whole folder again")

    def names(self) -> set[str]:
        """See :class:`ForeignFiles`."""
        return set(self._shards[0])

    def shape(self, name: str, split: int | None = None) -> tuple[int, ...]:
        """See :class:`ForeignFiles`."""
        shape = list(self._shards[0][name].shape)
        if split is not None and split < len(shape):
            shape[split] *= len(self._shards)
        return tuple(shape)

    def dtype(self, name: str) -> str:
        """See :class:`ForeignFiles`."""
        return dtype_name(self._shards[0][name].dtype)

    def read(self, name: str, box: Box, split: int | None = None) -> Tensor:
        """See :class:`ForeignFiles`."""
        shards = [shard[name] for shard in self._shards]
        if split is None or split >= len(box):
            for shard in shards[1:]:
                if not torch.equal(shard[box], shards[0][box]):
                    raise UserError.one(name, "is replicated in all files, but differs between them", DOWNLOAD_AGAIN)
            return shards[0][box]
        each, (start, stop) = shards[0].shape[split], (box[split].start, box[split].stop)
        parts = []
        for first, shard in zip(range(0, each * len(shards), each), shards, strict=True):
            inside = slice(max(0, start - first), max(0, stop - first))
            parts.append(shard[(*box[:split], inside, *box[split + 1 :])])
        return torch.cat(parts, dim=split)


def _same_layout(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and tensor.shape == other.shape and tensor.dtype == other.dtype
