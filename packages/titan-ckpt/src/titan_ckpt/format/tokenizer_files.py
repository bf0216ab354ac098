"""The files of a checkpoint's tokenizer, in its folder ``tokenizer``, with their hashes in the manifest. Whoever uses the
checkpoint reads these, and none that the manifest names elsewhere. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import require_no_link
from titan_ckpt.format.stored import MOST_FILES, TEMPLATES, TOKENIZER, BrokenCheckpoint, Manifest, is_file_name
from titan_core.api import UserError
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.cache_folder import cache_folder
from titan_core.toolkit.files import LONGEST_TABLE, read_bytes

MAIN: Final = ("tokenizer.json", "tokenizer.model")
BESIDE: Final = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What transformers reads beside one of :data:`MAIN`."""


def files_at(path: Path) -> dict[str, bytes]:
    """Return the files of the tokenizer at ``path``, a file or the folder that contains one of :data:`MAIN`, by their names;
    none if there is no such file. A file with another name may be one of several, and has no others beside it.

    Raises:
        UserError: one cannot be read, leads out of the folder, or has a name that a checkpoint cannot store; or they are too
            many.
    """
    folder = path if path.is_dir() else path.parent
    main = [name for name in MAIN if (folder / name).exists()] if path.is_dir() else [path.name] if path.exists() else []
    beside = [name for name in BESIDE if (folder / name).is_symlink() or (folder / name).exists()]
    beside += [f"{TEMPLATES}/{file.name}" for file in sorted((folder / TEMPLATES).glob("*.jinja"))]
    found: dict[str, bytes] = {}
    for name in [*main, *(beside if set(main) & set(MAIN) else ())]:
        if not is_file_name(name):
            raise UserError.one(str(folder / name), "has a name that a checkpoint cannot store", "rename it")
        try:
            inside = None if folder / name == path else folder
            found[name] = read_bytes(folder / name, longest=LONGEST_TABLE, inside=inside)
        except OSError as error:
            fix = "copy the file there if it belongs to the tokenizer, or remove it"
            raise UserError.one(str(folder / name), str(error.strerror or error), fix) from None
    if len(found) > MOST_FILES:
        raise UserError.one(
            str(folder), f"has {len(found)} files of a tokenizer, more than {MOST_FILES}", "remove some templates"
        )
    return found


def is_beside(name: str) -> bool:
    """Whether ``name`` is one of a file that belongs to one of :data:`MAIN`."""
    return name in BESIDE or name.startswith(f"{TEMPLATES}/")


def write_files(folder: Folder, files: Mapping[str, bytes]) -> dict[str, str]:
    """Write ``files`` to a new checkpoint, and return their hashes, for its manifest."""
    for name, contents in files.items():
        inner, _, last = f"{TOKENIZER}/{name}".rpartition("/")
        (folder / inner).make()
        (folder / inner).write(last, contents)
    return {name: hashlib.sha256(contents).hexdigest() for name, contents in files.items()}


def stored_files(folder: Folder, manifest: Manifest) -> dict[str, bytes]:
    """Return the files of the tokenizer in the checkpoint in ``folder``, by their names.

    Raises:
        BrokenCheckpoint: one is missing or damaged.
    """
    found = {}
    for name, sha256 in manifest.tokenizer.items():
        where = f"{TOKENIZER}/{name}"
        for path in (*Path(where).parents[:-1], where):
            require_no_link(folder, str(path))
        try:
            found[name] = folder.read(where)
        except OSError as error:
            raise BrokenCheckpoint(f"{where} cannot be read: {error.strerror or error}") from None
        if hashlib.sha256(found[name]).hexdigest() != sha256:
            raise BrokenCheckpoint(f"{where} is damaged: its checksum does not match")
    return found


def files_of(folder: Folder, manifest: Manifest) -> dict[str, bytes]:
    """See :func:`stored_files`.

    Raises:
        UserError: a file is missing or damaged.
    """
    try:
        return stored_files(folder, manifest)
    except BrokenCheckpoint as error:
        raise UserError.one(str(folder), str(error), "use another checkpoint") from None


def local_path(folder: Folder, manifest: Manifest) -> str | None:
    """Return ``model.tokenizer_path`` for the tokenizer in the checkpoint; ``None`` if it has none. That of a checkpoint at
    an address is copied to the cache.

    Raises:
        UserError: a file is missing or damaged.
    """
    files = files_of(folder, manifest)
    if not files:
        return None
    place = folder.local_path
    if place is not None:
        place = place / TOKENIZER
    else:
        digest = hashlib.sha256("".join(f"{name} {manifest.tokenizer[name]}\n" for name in sorted(files)).encode())
        place = cache_folder("tokenizers") / digest.hexdigest()
        for name, contents in files.items():
            with atomic_write(place / name) as part:
                part.write_bytes(contents)
    if set(files) & set(MAIN):
        return str(place)
    if len(files) > 1:
        raise UserError.one(str(folder), f"has several files of a tokenizer and no {MAIN[0]}", "use another checkpoint")
    return str(place / next(iter(files)))
