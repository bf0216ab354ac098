"""Reading weights that others have written: Hugging Face's safetensors and Meta's ``consolidated.*.pth``, a part of a tensor
at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_core.errors import UserError
from titan_core.weights import ForeignTensor

HF_INDEX = "model.safetensors.index.json"
CONFIG_OF = {"hf": "config.json", "meta": "params.json"}


class ForeignFiles(Protocol):
    """A folder of weights."""

    def names(self) -> set[str]:
        """Every tensor there."""
        ...

    def shape(self, tensor: ForeignTensor) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    def dtype(self, tensor: ForeignTensor) -> torch.dtype:
        """As it is stored."""
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
        UserError: files are missing.
    """
    return SafetensorsFiles(folder) if kind == "hf" else MetaFiles(folder)


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """The config file beside the weights.

    Raises:
        UserError: it is not there, or no JSON.
    """
    path = folder / CONFIG_OF[kind]
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError.one(str(path), f"cannot be read: {error.strerror}", "it belongs to the weights") from None
    except ValueError as error:
        raise UserError.one(str(path), f"is no JSON: {error}", "take it anew from where the weights come from") from None
    return config


class SafetensorsFiles:
    """One file, or several with an index."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / HF_INDEX
        listed: Mapping[str, str] | None = json.loads(index.read_text())["weight_map"] if index.exists() else None
        names = (
            sorted(set(listed.values())) if listed is not None else sorted(one.name for one in folder.glob("*.safetensors"))
        )
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for name in names:
            try:
                self._files[name] = safe_open(folder / name, framework="pt")
            except FileNotFoundError:
                raise UserError.one(str(folder / name), "is missing, and the index names it", "fetch it") from None
            except (SafetensorError, OSError) as error:
                raise UserError.one(str(folder / name), f"cannot be read: {error}", "fetch it anew") from None
            self._file_of |= dict.fromkeys(self._files[name].keys(), name)

    def names(self) -> set[str]:
        """See :class:`ForeignFiles`."""
        return set(self._file_of)

    def shape(self, tensor: ForeignTensor) -> tuple[int, ...]:
        """See :class:`ForeignFiles`."""
        return tuple(self._slice(tensor).get_shape())

    def dtype(self, tensor: ForeignTensor) -> torch.dtype:
        """See :class:`ForeignFiles`."""
        first = self._slice(tensor)[0:1]
        assert isinstance(first, Tensor)
        return first.dtype

    def rows(self, tensor: ForeignTensor, start: int, stop: int) -> Tensor:
        """See :class:`ForeignFiles`."""
        part = self._slice(tensor)[start:stop]
        assert isinstance(part, Tensor)
        return part

    def _slice(self, tensor: ForeignTensor) -> Any:
        return self._files[self._file_of[tensor.name]].get_slice(tensor.name)


class MetaFiles:
    """``consolidated.00.pth`` and so on, each with a share of every tensor. Mapped into memory, so that only what is looked
    at is read; and read by torch's unpickler that makes nothing but tensors."""

    def __init__(self, folder: Path) -> None:
        self._shards: list[Mapping[str, Tensor]] = []
        for file in sorted(folder.glob("consolidated.*.pth")):
            try:
                self._shards.append(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
            except Exception as error:
                why = f"cannot be read: {' '.join(str(error).split())[:200]}"
                raise UserError.one(str(file), why, "fetch it anew") from error

    def names(self) -> set[str]:
        """See :class:`ForeignFiles`."""
        return {name for name in self._shards[0] if name != "rope.freqs"}

    def shape(self, tensor: ForeignTensor) -> tuple[int, ...]:
        """See :class:`ForeignFiles`."""
        shape = list(self._shards[0][tensor.name].shape)
        if tensor.split is not None:
            shape[tensor.split] *= len(self._shards)
        return tuple(shape)

    def dtype(self, tensor: ForeignTensor) -> torch.dtype:
        """See :class:`ForeignFiles`."""
        return self._shards[0][tensor.name].dtype

    def rows(self, tensor: ForeignTensor, start: int, stop: int) -> Tensor:
        """See :class:`ForeignFiles`."""
        pieces = [shard[tensor.name] for shard in self._shards]
        if tensor.split is None:
            return pieces[0][start:stop]
        if tensor.split == 1:
            return torch.cat([piece[start:stop] for piece in pieces], dim=1)
        each = pieces[0].shape[0]
        parts = [piece[max(0, start - i * each) : max(0, stop - i * each)] for i, piece in enumerate(pieces)]
        return torch.cat([part for part in parts if part.shape[0]])


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


def require_tensors(
    files: ForeignFiles, tensors: Iterable[ForeignTensor], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Every tensor that the model needs must be there, in its shape, and equal to its copies.

    Raises:
        UserError: naming the first few that are not.
    """
    tensors = list(tensors)
    there = files.names()
    problems = []
    for tensor in tensors:
        wanted = shapes[tensor.parameter]
        if tensor.name not in there:
            problems.append(f"{tensor.name} is not there")
        elif files.shape(tensor) != wanted:
            problems.append(f"{tensor.name} is {list(files.shape(tensor))} there, and the model wants {list(wanted)}")
    if not problems:
        problems += (why for tensor in tensors for why in _different_copies(files, tensor))
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError.one(where, "; ".join(problems[:3]) + more, "are these the weights of this model?")


_COMPARED_ROWS = 8192
"""Rows that are compared at a time: an embedding of 128,256 x 3,072 takes 0.8 GB in bf16."""


def _different_copies(files: ForeignFiles, tensor: ForeignTensor) -> Iterator[str]:
    """What is wrong with the copies of ``tensor`` that are there."""
    for name in sorted(files.names().intersection(tensor.copies)):
        copy, shape = replace(tensor, name=name), files.shape(tensor)
        if files.shape(copy) != shape:
            yield f"{name} is {list(files.shape(copy))} there, and {tensor.name}, which the model ties it to, {list(shape)}"
            continue
        for start in range(0, shape[0], _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, shape[0])
            if not torch.equal(files.rows(tensor, start, stop), files.rows(copy, start, stop)):
                yield f"{name} differs from {tensor.name} in rows {start} to {stop - 1}, and the model ties one to the other"
                break
