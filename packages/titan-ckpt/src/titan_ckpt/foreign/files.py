"""Reading foreign weights (Hugging Face's safetensors and Meta's ``consolidated.*.pth``), a part of a tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_ckpt.foreign.config import DOWNLOAD_AGAIN, HF_INDEX, require_shards, weight_map
from titan_ckpt.format.dtypes import dtype_name
from titan_core.api import ForeignTensor, UserError

log = logging.getLogger(__name__)

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names in ``torch`` of the dtypes that safetensors files store weights in. Other dtypes keep their name in safetensors."""


class ForeignFiles(Protocol):
    """A folder of foreign weights."""

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, tensor: ForeignTensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        ...

    def dtype(self, name: str) -> str:
        """Return the dtype that a tensor is stored in, by its name in ``torch`` if :data:`~titan_ckpt.format.dtypes.FLOATS`
        has it."""
        ...

    def rows(self, tensor: ForeignTensor, start: int, stop: int) -> Tensor:
        """Read rows ``start`` to ``stop``, in the order of the files."""
        ...


def open_files(folder: Path, kind: str) -> ForeignFiles:
    """Open the Hugging Face or Meta weights in ``folder``.

    Raises:
        UserError: files are missing, damaged or inconsistent.
    """
    return SafetensorsFiles(folder) if kind == "hf" else MetaFiles(folder)


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
                self._files[file] = safe_open(folder / file, framework="pt")
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

    def shape(self, tensor: ForeignTensor) -> tuple[int, ...]:
        """See :class:`ForeignFiles`."""
        return tuple(self._slice(tensor.name).get_shape())

    def dtype(self, name: str) -> str:
        """See :class:`ForeignFiles`."""
        stored = str(self._slice(name).get_dtype())
        return _DTYPES.get(stored, stored)

    def rows(self, tensor: ForeignTensor, start: int, stop: int) -> Tensor:
        """See :class:`ForeignFiles`."""
        part = self._slice(tensor.name)[start:stop]
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
                shard = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
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

    def shape(self, tensor: ForeignTensor) -> tuple[int, ...]:
        """See :class:`ForeignFiles`."""
        shape = list(self._shards[0][tensor.name].shape)
        if tensor.split is not None and tensor.split < len(shape):
            shape[tensor.split] *= len(self._shards)
        return tuple(shape)

    def dtype(self, name: str) -> str:
        """See :class:`ForeignFiles`."""
        return dtype_name(self._shards[0][name].dtype)

    def rows(self, tensor: ForeignTensor, start: int, stop: int) -> Tensor:
        """See :class:`ForeignFiles`."""
        pieces = [shard[tensor.name] for shard in self._shards]
        if tensor.split is None:
            for piece in pieces[1:]:
                if not torch.equal(piece[start:stop], pieces[0][start:stop]):
                    raise UserError.one(tensor.name, "is replicated in all files, but differs between them", DOWNLOAD_AGAIN)
            return pieces[0][start:stop]
        if tensor.split == 1:
            return torch.cat([piece[start:stop] for piece in pieces], dim=1)
        each = pieces[0].shape[0]
        parts = [piece[max(0, start - i * each) : max(0, stop - i * each)] for i, piece in enumerate(pieces)]
        return torch.cat([part for part in parts if part.shape[0]])


def _same_layout(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and tensor.shape == other.shape and tensor.dtype == other.dtype


def our_rows(files: ForeignFiles, tensor: ForeignTensor, start: int, stop: int) -> Tensor:
    """Read rows ``start`` to ``stop`` of the parameter in this model's order of rows. Reads whole blocks of rows only."""
    block = len(tensor.row_order) or 1
    first, last = start // block * block, -(-stop // block) * block
    rows = files.rows(tensor, first, last)
    if tensor.row_order:
        rows = rows.unflatten(0, (-1, block))[:, list(tensor.row_order)].flatten(0, 1)
    return rows[start - first : stop - first]


def their_rows(whole: Tensor, tensor: ForeignTensor) -> Tensor:
    """Return a whole parameter with its rows in the order of the foreign format."""
    if not tensor.row_order:
        return whole
    inverse = sorted(range(len(tensor.row_order)), key=tensor.row_order.__getitem__)
    return whole.unflatten(0, (-1, len(inverse)))[:, inverse].flatten(0, 1)
