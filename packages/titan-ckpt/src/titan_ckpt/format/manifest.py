"""Reading and writing a checkpoint's manifest, ``checkpoint.json``.

A checkpoint is a folder ``step-N``. It contains a file ``data-R.bin`` per rank, with the raw bytes of its pieces of tensors
one after another and an index of them (:mod:`titan_ckpt.format.index`), and the manifest, with the layout of each tensor
(:mod:`titan_ckpt.format.layout`), the SHA-256 of each index, and all state that is not a tensor. The manifest is written
last, once all data is durable: a folder with a manifest is a complete checkpoint. Nothing is pickled.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ValidationError

from titan_ckpt.format.folder import LONGEST, Folder
from titan_ckpt.format.index import chunks_by_file
from titan_ckpt.format.manifest_checks import checked_manifest
from titan_ckpt.format.stored import (
    DATA_FILE,
    FORMAT,
    NAME,
    UNFINISHED,
    BrokenCheckpoint,
    Chunk,
    IncompleteCheckpoint,
    Manifest,
    chunk_digest,
)
from titan_core.api import Model, Registry, UserError
from titan_core.toolkit.plain_json import plain_json
from titan_core.toolkit.text import show_mistakes


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Write the manifest, which completes the checkpoint in ``folder``."""
    layouts = {id(tensor.layout): tensor.layout for tensor in manifest.tensors.values()}
    numbers = {one: number for number, one in enumerate(layouts)}
    contents = {
        "format": FORMAT,
        "step": manifest.step,
        "created": manifest.created,
        "about": manifest.about,
        "state": manifest.state,
        "files": manifest.files,
        "tokenizer": manifest.tokenizer,
        "layouts": [layout.as_json() for layout in layouts.values()],
        "tensors": {name: [tensor.dtype, numbers[id(tensor.layout)]] for name, tensor in manifest.tensors.items()},
    }
    text = _canonical(contents)
    folder.write(NAME, f'{{"sha256": "{_digest(text)}", "checkpoint": {text}}}\n'.encode())


def read_manifest(folder: Folder) -> Manifest:
    """Return the manifest of the checkpoint in ``folder``, after checking that pieces cover every tensor and that all data
    files exist with the right size.

    Raises:
        BrokenCheckpoint: the checkpoint is incomplete, damaged or inconsistent.
    """
    try:
        require_no_link(folder, NAME)
        document = plain_json(folder.read(NAME, _longest(folder)))
        contents = document["checkpoint"]
        if document["sha256"] != _digest(_canonical(contents)):
            raise BrokenCheckpoint(f"{NAME} is damaged: its checksum does not match")
    except FileNotFoundError:
        why = "its save was interrupted" if folder.size(UNFINISHED) is not None else f"there is no {NAME}"
        raise IncompleteCheckpoint(f"it is not complete: {why}") from None
    except OSError as error:
        raise BrokenCheckpoint(f"{NAME} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BrokenCheckpoint(f"{NAME} is damaged: it is not the JSON of a manifest") from None
    manifest = checked_manifest(contents)
    sizes = folder.sizes()
    for name, file in manifest.files.items():
        expected = file.num_bytes + file.index_bytes
        if sizes.get(name) != expected:
            require_no_link(folder, name)
            found = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise BrokenCheckpoint(f"{name} {found}; it should have {expected} bytes")
    return manifest


def _longest(folder: Folder) -> int:
    """Return the bytes that the manifest may have. That of a large checkpoint is a small part of its data; one that is not
    takes memory without need."""
    if (folder.size(NAME) or 0) <= LONGEST:
        return LONGEST
    data = sum(size for name, size in folder.sizes().items() if DATA_FILE.fullmatch(name))
    return max(LONGEST, data // 256)


def require_no_link(folder: Folder, name: str) -> None:
    """Require that the file ``name`` is in ``folder`` itself. A link could lead to a file that its maker cannot read.

    Raises:
        BrokenCheckpoint: it is a link.
    """
    if (folder / name).is_link:
        raise BrokenCheckpoint(f"{name} is a link, and a checkpoint is read from its own folder only")


def verify_data(folder: Folder, manifest: Manifest) -> Iterator[int]:
    """Verify the checksum of every chunk. Yields the size of each chunk in bytes.

    Raises:
        BrokenCheckpoint: a chunk does not match its checksum, or a file contains something else.
    """
    for file_name, chunks in chunks_by_file(folder, manifest):
        with folder.open(file_name) as file:
            for name, stored, chunk in chunks:
                file.seek(chunk.start)
                check_chunk(name, stored.dtype, chunk, file.read(chunk.num_bytes))
                yield chunk.num_bytes


def check_chunk(tensor: str, dtype: str, chunk: Chunk, data: bytes | memoryview) -> None:
    """Verify ``data``, read from a file, by the chunk's checksum.

    Raises:
        BrokenCheckpoint: the checksum does not match.
    """
    if len(data) != chunk.num_bytes or chunk_digest(tensor, dtype, chunk.offset, chunk.shape, data) != chunk.sha256:
        raise BrokenCheckpoint(f"{chunk.file} is damaged in {tensor}: its checksum does not match")


def _canonical(contents: Any) -> str:
    return json.dumps(contents, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def model_of(manifest: Manifest, registry: Registry) -> tuple[Model, BaseModel]:
    """Return the model of a checkpoint.

    Raises:
        UserError: its plugin is not installed, or no longer accepts its arguments.
    """
    name = manifest.about.get("model_name", "")
    model = registry.get(Model, name)
    cls = type(next(iter(model.flavors.values())))
    try:
        return model, cls.model_validate(manifest.about["model_args"], strict=True)
    except ValidationError as error:
        why = f"the installed version of model {name!r} does not accept its arguments: {show_mistakes(error)}"
        raise UserError.one("checkpoint", why, "update the plugin") from None


@contextmanager
def paused_gc() -> Iterator[None]:
    """Keep Python's own collections off. Plans and manifests of many ranks are millions of objects, and each collection
    visits all of them.

    For the main thread alone: the switch is the process's, and a thread would set it at a moment that suits nobody else.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
