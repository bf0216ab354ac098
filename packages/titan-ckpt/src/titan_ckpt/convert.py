"""``titan checkpoint convert``: between Titan's checkpoints and the formats that model plugins declare, one tensor (and one
file of the result) in memory at a time."""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from titan_ckpt.chunks import bytes_of, digest, read_chunk
from titan_ckpt.cli import pick, progress
from titan_ckpt.folder import Folder, write_all
from titan_ckpt.foreign_files import HF_INDEX, kind_of, open_files, our_rows, read_config, require_tensors, their_rows
from titan_ckpt.manifest import BrokenCheckpoint, Chunk, Manifest, StoredTensor, write_manifest
from titan_ckpt.tensors import MODEL
from titan_core.components import Model
from titan_core.errors import UserError
from titan_core.folder_lock import FolderLock
from titan_core.registry import Registry
from titan_core.weights import ForeignTensor, WeightFormat

FILE_BYTES = 5 * 10**9
"""Size that a file of an export stays below, where a single tensor lets it."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "generation_config.json",
)


def run(arguments: argparse.Namespace) -> int:
    """Convert in the direction that the source decides."""
    source, target = Path(arguments.source), Path(arguments.target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError.one(str(target), "is there already, and not empty", "name a new folder")
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    kind = kind_of(source) if source.is_dir() else None
    with FolderLock.beside(target, str(target)):
        # Nobody shall take half of it for the whole: the name comes last.
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            if kind is not None:
                from_foreign(source, kind, partial, arguments.registry, arguments.model, dtype)
            else:
                to_hf(arguments.source, partial, arguments.registry, dtype, arguments.tokenizer)
            if target.exists():
                target.rmdir()
            partial.rename(target)
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
            raise UserError.one(str(target), why, "make room, or choose another place") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {target}")
    return 0


def to_hf(source: str, target: Path, registry: Registry, dtype: torch.dtype | None, tokenizer: str | None) -> None:
    """A checkpoint of ours to a folder that ``transformers`` loads.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or its model has no such format.
    """
    from safetensors.torch import save_file

    found = pick(source, None)
    manifest = found.manifest
    assert manifest is not None
    model, args = _model_of(manifest, registry)
    form = next((one for one in model.formats if one.name == "hf" and one.from_args is not None), None)
    if form is None or form.from_args is None:
        raise UserError.one(f"model {model.name!r}", "its plugin declares no way to Hugging Face's format", "ask its author")
    tensors = form.tensors.load()(args)
    files = _plan_files(tensors, manifest, dtype)
    weight_map: dict[str, str] = {}
    total = 0
    with progress("tensors", len(tensors), False) as advance:
        for number, names in enumerate(files, 1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            shard = {}
            for tensor in names:
                whole = their_rows(read_whole(found.folder, manifest, f"{MODEL}.{tensor.parameter}"), tensor)
                shard[tensor.name] = (whole.to(dtype) if dtype is not None else whole).contiguous()
                advance(1)
            save_file(shard, target / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, name)
            total += sum(one.numel() * one.element_size() for one in shard.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / HF_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    stored = dtype or getattr(torch, manifest.tensors[f"{MODEL}.{tensors[0].parameter}"].dtype)
    config = {**form.from_args.load()(args), "torch_dtype": str(stored).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    given = tokenizer or manifest.about.get("config", {}).get("model", {}).get("tokenizer_path")
    if given:
        _copy_tokenizer(Path(given), target)


def from_foreign(
    source: Path, kind: str, target: Path, registry: Registry, model_name: str | None, dtype: torch.dtype | None
) -> None:
    """Foreign weights to a checkpoint of ours that holds weights alone.

    Raises:
        UserError: no model plugin knows them, or something of them is missing.
    """
    config = read_config(source, kind)
    model, form, args = _model_for(kind, config, registry, model_name, source)
    definition = model.define.load()(args)
    with torch.device("meta"):
        built: Any = definition.build()
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    tensors = form.tensors.load()(args)
    files = open_files(source, kind)
    require_tensors(files, tensors, shapes, str(source))
    stored: dict[str, StoredTensor] = {}
    folder, at = Folder(str(target)), 0
    with folder.create("data-00000.bin") as file, progress("tensors", len(tensors), False) as advance:
        for tensor in tensors:
            whole = our_rows(files, tensor, 0, shapes[tensor.parameter][0])
            whole = whole.to(dtype) if dtype is not None else whole
            data = bytes_of(whole)
            write_all(file, data)
            shape = tuple(whole.shape)
            chunk = Chunk((0,) * len(shape), shape, "data-00000.bin", at, len(data), digest(data))
            stored[f"{MODEL}.{tensor.parameter}"] = StoredTensor(str(whole.dtype).removeprefix("torch."), shape, (chunk,))
            at += len(data)
            advance(1)
    _copy_tokenizer(source, target)
    about = {"model": f"{model.name} from {source.name}", "model_name": model.name, "model_args": args.model_dump()}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_manifest(folder, Manifest(0, created, about, {}, stored, {"data-00000.bin": at}))


def read_whole(folder: Folder, manifest: Manifest, name: str) -> Tensor:
    """A tensor of a checkpoint, put together from its chunks.

    Raises:
        UserError: a chunk is damaged.
    """
    stored = manifest.tensors[name]
    dtype = getattr(torch, stored.dtype)
    whole = torch.empty(stored.shape, dtype=dtype)
    try:
        for chunk in stored.chunks:
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offset, chunk.shape, strict=True))
            whole[box] = read_chunk(folder, name, chunk, dtype)
    except BrokenCheckpoint as error:
        raise UserError.one(str(folder), str(error), "take another checkpoint") from None
    return whole


def _plan_files(
    tensors: Sequence[ForeignTensor], manifest: Manifest, dtype: torch.dtype | None
) -> list[list[ForeignTensor]]:
    """Which tensors go into which file."""
    files: list[list[ForeignTensor]] = [[]]
    room = FILE_BYTES
    for tensor in tensors:
        stored = manifest.tensors.get(f"{MODEL}.{tensor.parameter}")
        if stored is None:
            raise UserError.one("checkpoint", f"it has no {tensor.parameter}", "take one that was not saved in part")
        element = (dtype or getattr(torch, stored.dtype)).itemsize
        size = element * torch.Size(stored.shape).numel()
        if size > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1].append(tensor)
        room -= size
    return files


def _model_of(manifest: Manifest, registry: Registry) -> tuple[Model, BaseModel]:
    """The model that a checkpoint is of.

    Raises:
        UserError: its plugin is not installed, or no longer knows its arguments.
    """
    name = manifest.about.get("model_name", "")
    if name not in registry.names(Model):
        raise UserError.one("checkpoint", registry.unknown(Model), registry.suggest(Model, name))
    model = registry.get(Model, name)
    cls = type(next(iter(model.flavors.values())))
    try:
        return model, cls.model_validate(manifest.about["model_args"], strict=True)
    except ValidationError as error:
        why = f"its model's arguments are not model {name!r}'s: {error}"
        raise UserError.one("checkpoint", why, "update the plugin") from None


def _model_for(
    kind: str, config: Mapping[str, Any], registry: Registry, wanted: str | None, source: Path
) -> tuple[Model, WeightFormat, BaseModel]:
    """The model plugin that knows these weights.

    Raises:
        UserError: none does; with what each says.
    """
    reasons = []
    for model, form in _formats(registry, kind):
        if wanted is not None and model.name != wanted:
            continue
        try:
            return model, form, form.to_args.load()(config)
        except (ValueError, KeyError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            reasons.append(f"{model.name}: {why}")
    raise UserError.one(str(source), "no installed model knows these weights", "; ".join(reasons) or "install its plugin")


def _formats(registry: Registry, kind: str) -> Iterator[tuple[Model, WeightFormat]]:
    return ((model, form) for model in registry.all(Model) for form in model.formats if form.name == kind)


def _copy_tokenizer(given: Path, target: Path) -> None:
    """The tokenizer's files, where there are any."""
    if given.is_file():
        shutil.copy(given, target / given.name)
        return
    for name in TOKENIZER_FILES:
        if (given / name).is_file():
            shutil.copy(given / name, target / name)
