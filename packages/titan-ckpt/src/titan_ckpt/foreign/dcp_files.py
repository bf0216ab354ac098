"""Weights in a ``torch.distributed.checkpoint`` (DCP) folder, as TorchTitan and others write them."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from titan_ckpt.foreign.dcp_metadata import DcpChunk, DcpObject, DcpTensor, read_metadata
from titan_ckpt.foreign.files import Box
from titan_ckpt.format.catalogue import DCP_METADATA
from titan_ckpt.format.dtypes import dtype_name
from titan_core.api import ForeignTensor, UserError, matches
from titan_core.toolkit.files import open_file

_PREFIXES: Final = ("", "model.")
"""What names of weights begin with. TorchTitan used ``model.`` in full checkpoints until 2025."""
_OTHER_STATE: Final = ("optimizer", "lr_scheduler", "train_state", "dataloader")
"""First parts of the names of a TorchTitan run's other state."""
_STEP: Final = "train_state.step"
_COPY_AGAIN: Final = "copy the folder again, or use another checkpoint"


class DcpFiles:
    """The weights in a DCP folder (:class:`~titan_ckpt.foreign.files.ForeignFiles`). Entries that are not weights are
    counted in :attr:`left_out`, or remain in :meth:`names` under their own name, if it is not known what they are.

    Every archive is read with ``weights_only=True``, so that no code in it runs.
    """

    def __init__(
        self, folder: Path, declared: Sequence[ForeignTensor], ignored: Sequence[str] = (), excluded: Sequence[str] = ()
    ) -> None:
        """
        Args:
            declared: tensors of the model.
            ignored: patterns of tensors that hold no information.
            excluded: patterns of entries that the user does not want.

        Raises:
            UserError: the metadata is damaged, or a pattern of ``excluded`` matches nothing.
        """
        self._folder = folder
        entries = read_metadata(folder)
        self._step = entries.get(_STEP)
        self.left_out: Counter[str] = Counter()
        """Number of entries that are not imported, by pattern, by the first part of their name or by their whole name."""
        names = entries.keys()
        for pattern in excluded:
            found = {name for name in names if matches(name, (pattern,))}
            if not found:
                why = f"matches nothing in {folder}"
                raise UserError.one(f"--exclude {pattern}", why, "check the pattern, or remove it")
            self.left_out[pattern] = len(found)
            entries = {name: entry for name, entry in entries.items() if name not in found}
        known = {name for tensor in declared for name in (*tensor.names, *tensor.aliases)}
        prefix = max(_PREFIXES, key=lambda prefix: sum(prefix + name in entries for name in known))
        for name in sorted(known & entries.keys()):
            if prefix and prefix + name in entries and prefix + name not in known:
                why = f"contains both {name} and {prefix}{name}, two names of one tensor"
                raise UserError.one(str(folder), why, f"leave one of them out: --exclude {name}")
        self._tensors: dict[str, DcpTensor] = {}
        for full, entry in entries.items():
            name = full.removeprefix(prefix) if full.removeprefix(prefix) in known else full
            top = full.partition(".")[0]
            if name in known and isinstance(entry, DcpTensor):
                self._tensors[name] = entry
            elif top in _OTHER_STATE:
                self.left_out[top] += 1
            elif matches(full.removeprefix(prefix), ignored) or self._is_empty(full, entry):
                self.left_out[full] += 1
            elif isinstance(entry, DcpTensor):
                self._tensors[full] = entry
            else:
                why = f"{full} is a Python object, not a tensor, and is not known to hold no weights"
                raise UserError.one(str(folder), why, f"leave it out: --exclude {full}")

    @property
    def step(self) -> int:
        """Number of optimizer steps that the weights were trained for; 0 if the folder does not say so.

        Raises:
            UserError: the entry is damaged.
        """
        if not isinstance(self._step, DcpTensor) or self._step.shape:
            return 0
        return int(self._chunk(_STEP, self._step, self._step.chunks[0]))

    def names(self) -> set[str]:
        """See :class:`~titan_ckpt.foreign.files.ForeignFiles`."""
        return set(self._tensors)

    def shape(self, name: str, split: int | None = None) -> tuple[int, ...]:
        """See :class:`~titan_ckpt.foreign.files.ForeignFiles`."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """See :class:`~titan_ckpt.foreign.files.ForeignFiles`."""
        return self._tensors[name].dtype

    def read(self, name: str, box: Box, split: int | None = None) -> Tensor:
        """See :class:`~titan_ckpt.foreign.files.ForeignFiles`. Reads whole chunks.

        Raises:
            UserError: a chunk is missing, damaged, or not the tensor that the metadata describes.
        """
        stored = self._tensors[name]
        found = torch.empty([side.stop - side.start for side in box], dtype=getattr(torch, stored.dtype))
        for chunk in stored.chunks:
            ends = map(sum, zip(chunk.offset, chunk.shape, strict=True))
            common = [
                (max(side.start, begin), min(side.stop, end), side.start, begin)
                for side, begin, end in zip(box, chunk.offset, ends, strict=True)
            ]
            if all(first < last for first, last, _, _ in common):
                whole = self._chunk(name, stored, chunk)
                inside = tuple(slice(first - begin, last - begin) for first, last, _, begin in common)
                found[tuple(slice(first - start, last - start) for first, last, start, _ in common)] = whole[inside]
        return found

    def _is_empty(self, name: str, entry: DcpTensor | DcpObject) -> bool:
        """Whether an entry is a module's extra state (``Module.get_extra_state``) that holds nothing."""
        if not name.endswith("._extra_state"):
            return False
        if isinstance(entry, DcpTensor):
            return 0 in entry.shape
        value = self._load(name, entry.file, entry.start, entry.num_bytes)
        return value is None or (isinstance(value, Tensor) and value.numel() == 0)

    def _chunk(self, name: str, stored: DcpTensor, chunk: DcpChunk) -> Tensor:
        tensor = self._load(name, chunk.file, chunk.start, chunk.num_bytes)
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise self._damaged(chunk.file, f"contains no dense tensor for {name}")
        found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        wanted = f"{stored.dtype} {list(chunk.shape)}"
        if found != wanted:
            raise self._damaged(chunk.file, f"contains {found} for {name}, but {DCP_METADATA} describes {wanted}")
        return tensor.detach()

    def _load(self, name: str, file: str, start: int, num_bytes: int) -> object:
        try:
            with open_file(self._folder / file, inside=self._folder) as opened:
                opened.seek(start)
                data = opened.read(num_bytes)
        except OSError as error:
            raise self._damaged(file, f"cannot be read: {error.strerror or error}") from None
        if len(data) != num_bytes:
            raise self._damaged(file, f"ends within {name}")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # whose message says how to run the code in it
            why = f"{name} is damaged, or contains other objects than tensors, which could run code"
            raise self._damaged(file, why) from error
        except Exception as error:
            why = f"{name} cannot be read: {' '.join(str(error).split())[:200]}"
            raise self._damaged(file, why) from error

    def _damaged(self, file: str, why: str) -> UserError:
        return UserError.one(str(self._folder / file), why, _COPY_AGAIN)
