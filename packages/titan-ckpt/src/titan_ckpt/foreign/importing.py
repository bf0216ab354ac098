"""Importing weights in another format as a Titan checkpoint, with one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from titan_ckpt.foreign.arrangement import read
from titan_ckpt.foreign.checks import (
    as_named_in,
    declared_tensors,
    require_equal_copies,
    require_weights,
)
from titan_ckpt.foreign.config import formats_of, hf_about, model_for, owner, preferred, read_config
from titan_ckpt.foreign.dcp_files import DcpFiles
from titan_ckpt.foreign.files import ForeignFiles, open_files
from titan_ckpt.format.dtypes import dtype_name, to_dtype
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.writer import written_weights
from titan_ckpt.progress import progress
from titan_core.api import ForeignTensor, Model, Registry, UserError


@dataclass(frozen=True)
class Foreign:
    """Weights in another format, and the model that they belong to."""

    source: Path
    kind: str
    """The files (:attr:`~titan_core.api.WeightFormat.files`)."""
    model: Model
    args: BaseModel
    files: ForeignFiles
    declared: Sequence[ForeignTensor]
    """The tensors of the model, under the names that they have in the files."""
    ignored: tuple[str, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further entries for ``about`` of the manifest."""
    step: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Entries of the files that are not imported, and how many of each kind there are."""


def open_foreign_weights(source: Path, kind: str, registry: Registry, model_name: str | None) -> Foreign:
    """Open Hugging Face or Meta weights, whose config file describes the model.

    Raises:
        UserError: no installed model supports them, or files are missing or damaged.
    """
    model, form, args = model_for(kind, read_config(source, kind), registry, model_name, source)
    files = open_files(source, kind)
    declared = as_named_in(files, declared_tensors(form, args, model.name), str(source))
    about = hf_about(source) if kind == "safetensors" else {}
    return Foreign(source, kind, model, args, files, declared, form.ignored, about)


def open_dcp_weights(
    source: Path, model: Model, args: BaseModel, excluded: Sequence[str], about: Mapping[str, Any]
) -> Foreign:
    """Open the weights in a ``torch.distributed.checkpoint`` folder, which does not describe its model.

    Args:
        excluded: patterns of entries to leave out.
        about: see :attr:`Foreign.about`.

    Raises:
        UserError: the folder is damaged, or contains something that is not understood.
    """
    form = preferred(model, formats_of(model, "dcp"))
    if form is None:
        declared: Sequence[ForeignTensor] = _own_names(model, args)
    else:
        declared = declared_tensors(form, args, model.name)
    ignored = () if form is None else form.ignored
    files = DcpFiles(source, declared, ignored, excluded)
    declared = as_named_in(files, declared, str(source))
    return Foreign(source, "dcp", model, args, files, declared, ignored, about, files.step, files.left_out)


def import_weights(foreign: Foreign, target: Path, dtype: torch.dtype | None, tokenizer: Mapping[str, bytes]) -> None:
    """Write a Titan checkpoint that contains only weights, and the files of their tokenizer.

    Raises:
        UserError: they are not exactly the weights of the model, or a file is damaged.
    """
    model, files, declared, where = foreign.model, foreign.files, foreign.declared, str(foreign.source)
    wanted = _tensors_of(model, foreign.args)
    tensors = [tensor for tensor in declared if not tensor.copy]
    unnamed = wanted.keys() - {tensor.parameter for tensor in tensors}
    if unnamed:
        why = f"its plugin declares no {foreign.kind!r} tensor for {min(unnamed)}"
        raise UserError.one(owner(model), why, "add it to its WeightFormat")
    declared_by = f"{owner(model)}, format {foreign.kind!r}"
    require_weights(files, declared, wanted, foreign.ignored, where, declared_by)
    require_equal_copies(files, declared, where)
    about = {
        "model": f"{model.name} from {foreign.source.name}",
        "model_name": model.name,
        "model_args": foreign.args.model_dump(mode="json"),
        **foreign.about,
    }
    with (
        written_weights(Folder(str(target)), foreign.step, about, tokenizer) as writer,
        progress("tensors", len(tensors), False) as advance,
    ):
        for tensor in tensors:
            shape, _ = wanted[tensor.parameter]
            whole = read(files, tensor, shape)
            writer.add(tensor.parameter, to_dtype(whole, None if tensor.buffer else dtype, tensor.parameter))
            advance(1)


def _own_names(model: Model, args: BaseModel) -> list[ForeignTensor]:
    """Return the model's tensors under their own names; further names of a shared parameter are copies."""
    first: dict[int, str] = {}
    tensors = []
    for name, tensor in _built(model, args).state_dict(keep_vars=True).items():
        parameter = first.setdefault(id(tensor), name)
        tensors.append(ForeignTensor(name, parameter, copy=parameter != name))
    return tensors


def _built(model: Model, args: BaseModel) -> nn.Module:
    """Return the model on the meta device."""
    with torch.device("meta"):
        module = model.define.load()(args).build()
    assert isinstance(module, nn.Module)
    return module


def _tensors_of(model: Model, args: BaseModel) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """Return the shape of each tensor in a checkpoint of the model (its parameters and persistent buffers), and its dtype,
    unless that is floating-point: weights may have any precision."""
    built = _built(model, args)
    kept = built.state_dict().keys()
    named: list[tuple[str, Tensor]] = [*built.named_parameters(), *built.named_buffers()]
    return {
        name: (tuple(tensor.shape), None if tensor.is_floating_point() else dtype_name(tensor.dtype))
        for name, tensor in named
        if name in kept
    }
