"""Exporting a Titan checkpoint to another format, with one tensor (or one file of the export) in memory at a time."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from titan_ckpt.foreign.arrangement import by_name, their_shapes, write
from titan_ckpt.foreign.checks import declared_tensors
from titan_ckpt.foreign.config import HF_INDEX, formats_of, owner, preferred
from titan_ckpt.foreign.hf_export import (
    complete_tokenizer,
    copy_tokenizer,
    export_config,
    export_generation_config,
    given_tokenizer,
    warn_without_end_id,
    write_card,
    write_json,
    write_tokenizer,
)
from titan_ckpt.format.catalogue import Entry, pick
from titan_ckpt.format.chunks import read_whole, require_equal_weights
from titan_ckpt.format.dtypes import FLOATS, dtype_name, to_dtype
from titan_ckpt.format.manifest import model_of
from titan_ckpt.format.stored import MODEL, Manifest, StoredTensor
from titan_ckpt.format.tokenizer_files import MAIN, files_of, local_path
from titan_ckpt.progress import progress
from titan_core.api import ForeignTensor, Model, Registry, UserError, WeightFormat
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.text import say

FILE_BYTES = 5 * 10**9
"""Maximum size of a file of a Hugging Face export. Only a file with a single tensor may be larger."""


def to_hf(
    source: str,
    target: Path,
    registry: Registry,
    dtype: torch.dtype | None,
    tokenizer: str | None,
    inference: bool = False,
) -> int:
    """Convert a Titan checkpoint to a folder that ``transformers`` loads. Return the checkpoint's step.

    Args:
        inference: whether to leave out what only training uses (:attr:`titan_core.api.Model.training_only`).

    Raises:
        UserError: the checkpoint is missing or damaged, or its model cannot be exported.
    """
    from safetensors.torch import save_file

    found = pick(source, None)
    manifest = found.manifest
    assert manifest is not None
    model, args = model_of(manifest, registry)
    form, tensors = hf_tensors(model, args, {name: tensor.dtype for name, tensor in manifest.tensors.items()})
    if inference:
        whole, args = args, args.model_copy(update=dict(model.training_only))
        if args == whole:
            why = f"this model, {model.name!r}, has nothing that only training uses"
            raise UserError.one("--inference", why, "leave it out")
        tensors = [tensor for tensor in declared_tensors(form, args, model.name) if not tensor.copy]
    require_equal_weights(found.folder, manifest)
    stored = dtype_name(dtype) if dtype else manifest.tensors[f"{MODEL}.{tensors[0].parameter}"].dtype
    # Before anything is written: the format may not be able to express the model.
    config = export_config(form, args, manifest.about, stored)
    sources, read = by_name(tensors), _reader(found)
    files = _plan_files(sources, manifest, dtype)
    weight_map: dict[str, str] = {}
    total = 0
    with progress("tensors", len(sources), False) as advance:
        for number, names in enumerate(files, 1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            shard = {}
            for foreign in names:
                shard[foreign] = _exported(foreign, sources[foreign], read, dtype)
                advance(1)
            with atomic_write(target / name) as part:
                save_file(shard, part, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, name)
            total += sum(exported.numel() * exported.element_size() for exported in shard.values())
    if len(files) > 1:
        write_json(target / HF_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(target / "config.json", config)
    generation = export_generation_config(manifest.about, config.get("vocab_size"))
    if generation:
        write_json(target / "generation_config.json", generation)
    warn_without_end_id({**config, **generation})
    _export_tokenizer(found, tokenizer, target, registry)
    write_card(target, manifest)
    return manifest.step


def hf_tensors(model: Model, args: BaseModel, stored: Mapping[str, str]) -> tuple[WeightFormat, Sequence[ForeignTensor]]:
    """Return the format in which the model is exported to Hugging Face, and its tensors.

    Args:
        stored: dtype of each tensor of a checkpoint, by its name there.

    Raises:
        UserError: the model has no such format, or the format lacks one of the tensors.
    """
    form = preferred(model, [form for form in formats_of(model, "safetensors") if form.from_args is not None])
    if form is None:
        raise UserError.one(
            owner(model),
            "cannot be exported to Hugging Face format",
            "its author can declare a WeightFormat of 'safetensors' with from_args",
        )
    tensors = [tensor for tensor in declared_tensors(form, args, model.name) if not tensor.copy]
    _require_all_exported(stored, tensors, owner(model), "safetensors", FLOATS)
    return form, tensors


def to_dcp(source: str, target: Path, registry: Registry, dtype: torch.dtype | None) -> None:
    """Convert a Titan checkpoint to a ``torch.distributed.checkpoint`` folder with the weights alone, under the names that
    TorchTitan uses for the model.

    Raises:
        UserError: the checkpoint is missing or damaged, or its model cannot be exported.
    """
    found = pick(source, None)
    manifest = found.manifest
    assert manifest is not None
    model, args = model_of(manifest, registry)
    form = preferred(model, formats_of(model, "dcp"))
    if form is None:
        own_names = (name.removeprefix(f"{MODEL}.") for name in manifest.tensors if name.startswith(f"{MODEL}."))
        tensors = [ForeignTensor(name, name) for name in own_names]
    else:
        tensors = [tensor for tensor in declared_tensors(form, args, model.name) if not tensor.copy]
    _require_all_exported({name: tensor.dtype for name, tensor in manifest.tensors.items()}, tensors, owner(model), "dcp")
    require_equal_weights(found.folder, manifest)
    sources, read = by_name(tensors), _reader(found)
    planned = {name: _planned(name, parameters, manifest, dtype) for name, parameters in sources.items()}
    with progress("tensors", len(sources), False) as advance:

        def written(name: str) -> Tensor:
            advance(1)
            return _exported(name, sources[name], read, dtype)

        write_dcp(target, planned, written)


def _reader(found: Entry) -> Callable[[str], Tensor]:
    """Return the function that reads a whole parameter. It keeps the last two: a stack of experts is in many tensors, which
    it may share with another one."""
    manifest = found.manifest
    assert manifest is not None
    return lru_cache(maxsize=2)(lambda parameter: read_whole(found.folder, manifest, f"{MODEL}.{parameter}"))


def _exported(
    name: str, sources: Sequence[ForeignTensor], read: Callable[[str], Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Return the tensor ``name`` of an export, which shares no memory with a parameter."""
    converted = to_dtype(write(name, sources, read), None if sources[0].buffer else dtype, sources[0].parameter)
    return converted.clone(memory_format=torch.contiguous_format)


def _planned(name: str, sources: Sequence[ForeignTensor], manifest: Manifest, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor on the meta device that is like the tensor ``name`` of an export."""
    stored = _stored(manifest, sources[0])
    shape = their_shapes(sources[0], stored.shape)[name]
    return described(shape, stored.dtype, None if sources[0].buffer else dtype)


def _require_all_exported(
    stored: Mapping[str, str], tensors: Sequence[ForeignTensor], owner: str, form: str, dtypes: Collection[str] = ()
) -> None:
    """Require an export to contain every tensor of the model.

    Args:
        stored: dtype of each tensor of the checkpoint, by name.
        owner: plugin and name of the model, for messages.
        form: name of the format, for messages.
        dtypes: dtypes that the format can hold (default: all).

    Raises:
        UserError: the plugin declares no foreign tensor for one of them, or one has another dtype.
    """
    exported = {f"{MODEL}.{tensor.parameter}": tensor for tensor in tensors}
    missing = [name for name in stored if name.startswith(f"{MODEL}.") and name not in exported]
    if missing:
        why = f"format {form!r} declares no tensor for {', '.join(missing[:3])}, so the export would be incomplete"
        fix = "add it to its WeightFormat; parameters that a transform has added are written by a command of its plugin"
        raise UserError.one(owner, why, fix)
    for name in sorted(exported.keys() & stored.keys()):
        if dtypes and not exported[name].buffer and stored[name] not in dtypes:
            why = f"is stored as {stored[name]}, which is not a dtype of weights"
            raise UserError.one(name.removeprefix(f"{MODEL}."), why, "is this a checkpoint of a training run?")


def _export_tokenizer(found: Entry, given: str | None, target: Path, registry: Registry) -> None:
    """Write the ``given`` tokenizer; by default that in the checkpoint, or what it writes itself for ``transformers``. No
    other file is read, whatever the checkpoint names.

    Raises:
        UserError: there is no tokenizer at ``given``, or the checkpoint's is damaged.
    """
    manifest = found.manifest
    assert manifest is not None
    copy_tokenizer(given_tokenizer(given) if given is not None else files_of(found.folder, manifest), target)
    if given is None and not (target / MAIN[0]).is_file():
        why = write_tokenizer(manifest.about, local_path(found.folder, manifest), target, registry)
        if why is not None:
            fix = "pass one with --tokenizer (`titan tokenizer download OWNER/NAME` downloads one)"
            say(f"titan: warning: exported without a tokenizer that transformers reads: {why}; {fix}", file=sys.stderr)
    complete_tokenizer(target, manifest.about)


def _plan_files(
    sources: Mapping[str, Sequence[ForeignTensor]], manifest: Manifest, dtype: torch.dtype | None
) -> list[list[str]]:
    """Return the names of the tensors in each file of an export."""
    files: list[list[str]] = [[]]
    room = FILE_BYTES
    for name, parameters in sources.items():
        planned = _planned(name, parameters, manifest, dtype)
        size = planned.numel() * planned.itemsize
        if size > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


def _stored(manifest: Manifest, tensor: ForeignTensor) -> StoredTensor:
    try:
        return manifest.tensors[f"{MODEL}.{tensor.parameter}"]
    except KeyError:
        why = f"it does not contain {tensor.parameter}"
        raise UserError.one("checkpoint", why, "use a checkpoint of the whole model") from None


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
    """Return a tensor on the meta device, as :func:`~titan_ckpt.format.dtypes.to_dtype` converts one so ``stored``."""
    tensor = torch.empty(shape, dtype=getattr(torch, stored), device="meta")
    return tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor
