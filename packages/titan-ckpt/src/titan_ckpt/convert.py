"""``titan checkpoint convert``: converting between Titan checkpoints and the formats that model plugins declare, with one
tensor (or one file of an export) in memory at a time."""

from __future__ import annotations

import datetime
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from titan_ckpt.catalogue import Entry
from titan_ckpt.chunks import bytes_of, read_whole
from titan_ckpt.cli import pick, progress
from titan_ckpt.diverging_replicas import require_equal_weights
from titan_ckpt.dtypes import FLOATS, dtype_name, overflows
from titan_ckpt.folder import Folder, write_all
from titan_ckpt.foreign_checks import declared_tensors, require_equal_copies, require_weights
from titan_ckpt.foreign_config import hf_about, kind_of, model_for, read_config
from titan_ckpt.foreign_files import HF_INDEX, open_files, our_rows, their_rows
from titan_ckpt.hf_export import (
    complete_tokenizer,
    copy_tokenizer,
    export_config,
    export_generation_config,
    warn_without_end_id,
    write_json,
)
from titan_ckpt.manifest import write_manifest
from titan_ckpt.stored import MODEL, Chunk, Manifest, StoredTensor, chunk_digest
from titan_ckpt.stored_model import model_of
from titan_core.api.command import CommandContext
from titan_core.api.components import Model
from titan_core.api.errors import UserError
from titan_core.api.registry import ComponentRegistry
from titan_core.api.runs.folder_lock import FolderLock
from titan_core.api.weights import ForeignTensor

FILE_BYTES = 5 * 10**9
"""Maximum size of a file of an export. Only a file with a single tensor may be larger."""


def run(context: CommandContext) -> int:
    """Convert to or from Titan's format, depending on the source."""
    arguments = context.arguments
    source, target = Path(arguments.source), Path(arguments.target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError.one(str(target), "already exists and is not empty", "choose a new folder")
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    kind = kind_of(source) if source.is_dir() else None
    with FolderLock.beside(target, str(target)):
        # Rename at the end, so that no partial result exists under the target's name.
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            if kind is not None:
                from_foreign(source, kind, partial, context.registry, arguments.model, dtype)
            else:
                to_hf(arguments.source, partial, context.registry, dtype, arguments.tokenizer)
            if target.exists():
                target.rmdir()
            partial.rename(target)
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
            raise UserError.one(str(target), why, "make space, or choose another location") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {target}")
    return 0


def to_hf(source: str, target: Path, registry: ComponentRegistry, dtype: torch.dtype | None, tokenizer: str | None) -> None:
    """Convert a Titan checkpoint to a folder that ``transformers`` loads.

    Raises:
        UserError: the checkpoint is missing or damaged, or its model cannot be exported.
    """
    from safetensors.torch import save_file

    found = pick(source, None)
    manifest = found.manifest
    assert manifest is not None
    model, args = model_of(manifest, registry)
    form = next((form for form in model.formats if form.name == "hf" and form.from_args is not None), None)
    if form is None:
        raise UserError.one(
            f"model {model.name!r}", "its plugin does not support export to Hugging Face format", "ask the plugin's author"
        )
    tensors = [tensor for tensor in declared_tensors(form, args, model.name) if not tensor.copy]
    _require_all_exported(manifest, tensors, model.name)
    require_equal_weights(found.folder, manifest)
    files = _plan_files(tensors, manifest, dtype)
    weight_map: dict[str, str] = {}
    total = 0
    with progress("tensors", len(tensors), False) as advance:
        for number, names in enumerate(files, 1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            shard = {}
            for tensor in names:
                whole = their_rows(read_whole(found.folder, manifest, f"{MODEL}.{tensor.parameter}"), tensor)
                shard[tensor.name] = _to_dtype(whole, dtype, tensor.parameter).contiguous()
                advance(1)
            save_file(shard, target / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, name)
            total += sum(exported.numel() * exported.element_size() for exported in shard.values())
    if len(files) > 1:
        write_json(target / HF_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    stored = dtype_name(dtype) if dtype else manifest.tensors[f"{MODEL}.{tensors[0].parameter}"].dtype
    config = export_config(form, args, manifest.about, stored)
    write_json(target / "config.json", config)
    generation = export_generation_config(manifest.about)
    if generation:
        write_json(target / "generation_config.json", generation)
    warn_without_end_id({**config, **generation})
    _export_tokenizer(found, tokenizer, target)


def _require_all_exported(manifest: Manifest, tensors: Sequence[ForeignTensor], model: str) -> None:
    """Require an export to contain every tensor of the model.

    Raises:
        UserError: the plugin declares no foreign tensor for one of them, or one is stored in a quantised dtype.
    """
    exported = {f"{MODEL}.{tensor.parameter}" for tensor in tensors}
    missing = [name for name in manifest.tensors if name.startswith(f"{MODEL}.") and name not in exported]
    if missing:
        why = f"its plugin declares no Hugging Face tensor for {', '.join(missing[:3])}, so the export would be incomplete"
        raise UserError.one(f"model {model!r}", why, "ask the plugin's author")
    for name in sorted(exported & manifest.tensors.keys()):
        if manifest.tensors[name].dtype not in FLOATS:
            why = f"is stored as {manifest.tensors[name].dtype}, which is not a dtype of weights"
            raise UserError.one(name.removeprefix(f"{MODEL}."), why, "is this a checkpoint of a training run?")


def _export_tokenizer(found: Entry, given: str | None, target: Path) -> None:
    """Copy the ``given`` tokenizer; by default the one in the checkpoint's folder, or else the run's.

    Raises:
        UserError: there is no tokenizer at ``given``.
    """
    assert found.manifest is not None
    about = found.manifest.about
    of_run = about.get("config", {}).get("model", {}).get("tokenizer_path")
    if given is not None:
        if not copy_tokenizer(Path(given).expanduser(), target):
            fix = "pass a tokenizer.json, or a folder that contains one (`titan tokenizer download OWNER/NAME` makes one)"
            raise UserError.one(given, "there is no tokenizer here", fix)
    else:
        candidates = [path] if (path := found.folder.local_path) is not None else []
        candidates += [Path(of_run).expanduser()] if of_run else []
        if not any(copy_tokenizer(path, target) for path in candidates) and of_run:
            warning = f"the run's tokenizer {of_run} does not exist: exported without a tokenizer; "
            warning += "pass one with --tokenizer (`titan tokenizer download OWNER/NAME` downloads one)"
            print(f"titan: warning: {warning}", file=sys.stderr)
    complete_tokenizer(target, about)


def from_foreign(
    source: Path, kind: str, target: Path, registry: ComponentRegistry, model_name: str | None, dtype: torch.dtype | None
) -> None:
    """Convert foreign weights to a Titan checkpoint that contains only weights.

    Raises:
        UserError: no installed model supports them, or they are not exactly the weights of a model.
    """
    config = read_config(source, kind)
    model, form, args = model_for(kind, config, registry, model_name, source)
    declared = declared_tensors(form, args, model.name)
    files = open_files(source, kind)
    shapes = _shapes_of(model, args)
    tensors = [tensor for tensor in declared if not tensor.copy]
    unnamed = shapes.keys() - {tensor.parameter for tensor in tensors}
    if unnamed:
        why = f"its plugin declares no {kind!r} tensor for {min(unnamed)}"
        raise UserError.one(f"model {model.name!r}", why, "ask the plugin's author")
    require_weights(files, declared, {name: (shape, None) for name, shape in shapes.items()}, form.ignored, str(source))
    require_equal_copies(files, declared, str(source))
    stored: dict[str, StoredTensor] = {}
    folder, at = Folder(str(target)), 0
    with folder.create("data-00000.bin") as file, progress("tensors", len(tensors), False) as advance:
        for tensor in tensors:
            whole = our_rows(files, tensor, 0, shapes[tensor.parameter][0])
            whole = _to_dtype(whole, dtype, tensor.parameter)
            data = bytes_of(whole)
            write_all(file, data)
            name, kept_as, shape = f"{MODEL}.{tensor.parameter}", dtype_name(whole.dtype), tuple(whole.shape)
            begin = (0,) * len(shape)
            digest = chunk_digest(name, kept_as, begin, shape, data)
            chunk = Chunk(begin, shape, "data-00000.bin", at, len(data), digest)
            stored[name] = StoredTensor(kept_as, shape, (chunk,))
            at += len(data)
            advance(1)
    copy_tokenizer(source, target)
    about = {
        "model": f"{model.name} from {source.name}",
        "model_name": model.name,
        "model_args": args.model_dump(mode="json"),
        **(hf_about(source) if kind == "hf" else {}),
    }
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_manifest(folder, Manifest(0, created, about, {}, stored, {"data-00000.bin": at}))


def _to_dtype(tensor: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    """Convert ``tensor`` to ``dtype``, unless that is ``None``.

    Raises:
        UserError: a value is too large for ``dtype``.
    """
    if dtype is None:
        return tensor
    converted = tensor.to(dtype)
    if overflows(tensor, converted):
        largest, limit = tensor.abs().max().item(), torch.finfo(dtype).max
        why = f"its largest value is {largest:.3g}, but {dtype_name(dtype)} is limited to {limit:.3g}"
        raise UserError.one(name, why, "use --dtype bfloat16 or float32")
    return converted


def _shapes_of(model: Model, args: BaseModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a checkpoint of the model: its parameters and persistent buffers."""
    with torch.device("meta"):
        built: Any = model.define.load()(args).build()
    kept = built.state_dict().keys()
    named = (*built.named_parameters(), *built.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in named if name in kept}


def _plan_files(
    tensors: Sequence[ForeignTensor], manifest: Manifest, dtype: torch.dtype | None
) -> list[list[ForeignTensor]]:
    """Return the tensors of each file of an export."""
    files: list[list[ForeignTensor]] = [[]]
    room = FILE_BYTES
    for tensor in tensors:
        stored = manifest.tensors.get(f"{MODEL}.{tensor.parameter}")
        if stored is None:
            raise UserError.one(
                "checkpoint", f"it does not contain {tensor.parameter}", "use a checkpoint of the whole model"
            )
        element = (dtype or getattr(torch, stored.dtype)).itemsize
        size = element * torch.Size(stored.shape).numel()
        if size > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1].append(tensor)
        room -= size
    return files
