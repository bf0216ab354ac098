"""Reading weights that others have written: Hugging Face's safetensors and Meta's ``consolidated.*.pth``, a part of a tensor
at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from titan_ckpt.dtypes import dtype_name
from titan_core.api.errors import UserError
from titan_core.api.tools.plain_json import read_object
from titan_core.api.weights import ForeignTensor

log = logging.getLogger(__name__)

HF_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What safetensors calls the types that weights are used in; other types keep their name there."""
DOWNLOAD_AGAIN: Final = "download it again"


class ForeignFiles(Protocol):
    """A folder of weights."""

    def names(self) -> set[str]:
        """Every tensor there."""
        ...

    def shape(self, tensor: ForeignTensor) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    def dtype(self, name: str) -> str:
        """The type that a tensor is stored in, by its name in ``torch`` for those of :data:`~titan_ckpt.dtypes.FLOATS`."""
        ...

    def rows(self, tensor: ForeignTensor, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop``, in the order that they have there."""
        ...


def kind_of(folder: Path) -> str | None:
    """ "hf", "meta", or ``None`` where the folder holds neither."""
    if any(folder.glob("*.safetensors")):
        return "hf"
    return "meta" if any(folder.glob("consolidated.*.pth")) else None


def open_files(folder: Path, kind: str) -> ForeignFiles:
    """The weights in ``folder``.

    Raises:
        UserError: files are missing, damaged, or contradict each other.
    """
    return SafetensorsFiles(folder) if kind == "hf" else MetaFiles(folder)


class SafetensorsFiles:
    """One file, or several with an index."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / HF_INDEX
        listed = _weight_map(index) if index.exists() else None
        there = sorted(one.name for one in folder.glob("*.safetensors"))
        found = there if listed is None else sorted(set(listed.values()))
        if unread := [name for name in there if name not in found]:
            # Publishers put the same weights into a folder twice, in their own layout and in this one.
            log.warning("%s is not read: %s names other files", ", ".join(unread), index)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for file in found:
            try:
                self._files[file] = safe_open(folder / file, framework="pt")
                names = list(self._files[file].keys())
            except FileNotFoundError:
                raise UserError.one(str(folder / file), "is missing, and the index names it", "fetch it") from None
            except (SafetensorError, OSError) as error:
                raise UserError.one(str(folder / file), f"cannot be read: {error}", DOWNLOAD_AGAIN) from None
            for name in names:
                if name in self._file_of:
                    why = f"has a tensor {name}, which {self._file_of[name]} has too"
                    raise UserError.one(str(folder / file), why, "keep the files of one model in a folder")
                self._file_of[name] = file
        if listed is not None and listed != self._file_of:
            name = min(name for name in {*listed, *self._file_of} if listed.get(name) != self._file_of.get(name))
            said, true = (of.get(name, "no file") for of in (listed, self._file_of))
            why = f"says that the tensor {name} is in {said}, and it is in {true}"
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


def _weight_map(index: Path) -> dict[str, str]:
    """Which file has which tensor, as the index says.

    Raises:
        UserError: it says something else, or leads out of its folder.
    """
    contents = read_object(index, DOWNLOAD_AGAIN).get("weight_map")
    if not isinstance(contents, dict) or not all(isinstance(file, str) for file in contents.values()):
        raise UserError.one(str(index), "has no weight_map from tensors to files", DOWNLOAD_AGAIN)
    for file in contents.values():
        if not file.endswith(".safetensors") or file != Path(file).name or "\\" in file or "\0" in file:
            raise UserError.one(str(index), f"{file!r} is not the name of a file of its folder", "do not use this folder")
    return contents


class MetaFiles:
    """``consolidated.00.pth`` and so on, each with a share of every tensor. Mapped into memory, so that only what is looked
    at is read; and read by torch's unpickler that makes nothing but tensors."""

    def __init__(self, folder: Path) -> None:
        self._shards: list[Mapping[str, Tensor]] = []
        for file in sorted(folder.glob("consolidated.*.pth")):
            try:
                shard = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:
                why = f"cannot be read: {' '.join(str(error).split())[:200]}"
                raise UserError.one(str(file), why, DOWNLOAD_AGAIN) from error
            if not isinstance(shard, dict) or not all(
                isinstance(name, str) and isinstance(one, Tensor) for name, one in shard.items()
            ):
                raise UserError.one(str(file), "holds something else than tensors by name", "are these Meta's weights?")
            self._shards.append(shard)
            different = {name for name, one in shard.items() if not _alike(one, self._shards[0].get(name))}
            different |= self._shards[0].keys() - shard.keys()
            if different:
                why = f"its tensor {min(different)} is not as that of the first file"
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
                    raise UserError.one(
                        tensor.name, "is not the same in all files, each of which has it whole", DOWNLOAD_AGAIN
                    )
            return pieces[0][start:stop]
        if tensor.split == 1:
            return torch.cat([piece[start:stop] for piece in pieces], dim=1)
        each = pieces[0].shape[0]
        parts = [piece[max(0, start - i * each) : max(0, stop - i * each)] for i, piece in enumerate(pieces)]
        return torch.cat([part for part in parts if part.shape[0]])


def _alike(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and one.dtype == other.dtype


def our_rows(files: ForeignFiles, tensor: ForeignTensor, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of the parameter as it is here. No more than a block of rows beyond them is read."""
    block = len(tensor.row_order) or 1
    first, last = start // block * block, -(-stop // block) * block
    rows = files.rows(tensor, first, last)
    if tensor.row_order:
        rows = rows.unflatten(0, (-1, block))[:, list(tensor.row_order)].flatten(0, 1)
    return rows[start - first : stop - first]


def their_rows(whole: Tensor, tensor: ForeignTensor) -> Tensor:
    """A whole parameter with its rows in the order that they have there."""
    if not tensor.row_order:
        return whole
    inverse = sorted(range(len(tensor.row_order)), key=tensor.row_order.__getitem__)
    return whole.unflatten(0, (-1, len(inverse)))[:, inverse].flatten(0, 1)
