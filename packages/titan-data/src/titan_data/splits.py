"""Assigns the files of a local dataset to splits. Does not import torch or ``datasets``.

The first of these that applies defines the splits of a folder:

* ``dataset_dict.json``, written by ``DatasetDict.save_to_disk``: one folder per split.
* The file layout of the Hugging Face hub: ``data/SPLIT-00000-of-00003.parquet``, or folders and files whose names contain
  one of :data:`KEYWORDS` (``train/``, ``test-0.jsonl``).
"""

from __future__ import annotations

import logging
import multiprocessing
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_core.api import DatasetContext, UserError
from titan_core.toolkit.plain_json import json_kind, read_object
from titan_core.toolkit.reading import ALL_SPLITS

log = logging.getLogger(__name__)

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of splits, by canonical name. As in ``datasets``, a keyword must stand between separators (``c4-test.03``)."""

DATASET_DICT, DATASET_STATE = "dataset_dict.json", "state.json"
_SAVE = "save the dataset again"

_CANONICAL = {word: split for split, words in KEYWORDS.items() for word in words}
_KEYWORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_CANONICAL)})(?=$|[-._ 0-9])", re.IGNORECASE)
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\b")


def files_of_split(files: Sequence[Path], root: Path, context: DatasetContext[Any]) -> list[Path]:
    """Return the files that belong to the requested split.

    Args:
        files: files below ``root``.

    Raises:
        UserError: the split does not exist, or no split was requested and the default is ambiguous.
    """
    if context.split == ALL_SPLITS:
        return list(files)
    labels = _labels(files, root, by_file_name=context.name != "text")
    names = sorted({label for label in labels if label is not None})
    others = [file for file, label in zip(files, labels, strict=True) if label is None]
    if not names and context.split is None:
        return list(files)
    wanted = context.split or _default(names, others, context)
    if wanted is None and names == [context.default_split]:
        return list(files)
    canonical = _CANONICAL.get((wanted or "").lower(), wanted)
    if canonical not in names:
        raise _unclear(names, others, root, context)
    if multiprocessing.parent_process() is None:  # log once, not in each worker
        log.info("dataset %s: reading split %r of %s", context.path, canonical, ", ".join(names))
    return [file for file, label in zip(files, labels, strict=True) if label == canonical]


def _default(names: Sequence[str], others: Sequence[Path], context: DatasetContext[Any]) -> str | None:
    """Return the split to read if none was requested; ``None`` if that is ambiguous."""
    if context.default_split == "validation":
        return "test" if names == ["test"] else "validation"
    # Files outside all splits may be training data or belong to another split.
    return None if others else "train"


def _unclear(names: Sequence[str], others: Sequence[Path], root: Path, context: DatasetContext[Any]) -> UserError:
    several = len(names) > 1
    if names:
        found = f"the {'splits are' if several else 'only split is'} {', '.join(names)}"
        if others:
            found += f", and there are files outside all splits ({others[0].relative_to(root)})"
    else:
        found = "no folder or file is named after a split"
    if context.split is not None:
        why = f"{context.split_key} is {context.split!r}, but {found}"
    else:
        why = f"it is ambiguous which split to read: {found}"
    choices = ", ".join([*names, f"or {ALL_SPLITS!r} for all files"])
    fix = f"set {context.split_key} to {'one of ' if several else ''}{choices}" if names else "drop the key"
    return UserError.one(context.where, why, fix)


def _labels(files: Sequence[Path], root: Path, *, by_file_name: bool) -> list[str | None]:
    """Return the split of each file; ``None`` if its path names no split."""
    below = [file.relative_to(root) for file in files]
    listed = _listed(root / DATASET_DICT, "splits") if (root / DATASET_DICT).is_file() else None
    if listed is not None:
        return [_CANONICAL.get(path.parts[0], path.parts[0]) if path.parts[0] in listed else None for path in below]
    shards = [_shard_label(path, root) for path in below]
    if len(set(shards) - {None}) > 1:
        return [label or _name_label(path, by_file_name) for label, path in zip(shards, below, strict=True)]
    return [_name_label(path, by_file_name) for path in below]


def _shard_label(path: Path, root: Path) -> str | None:
    """Return SPLIT of a path ``data/SPLIT-00000-of-00003.parquet``. It may be any name."""
    folder = path.parent.name or root.name
    match = _SHARD.match(path.name) if folder == "data" else None
    return _CANONICAL.get(match[1], match[1]) if match is not None else None


def _name_label(path: Path, by_file_name: bool) -> str | None:
    """Return the split that the innermost folder or else the file is named after. A name with two keywords is ignored."""
    for name in (*reversed(path.parent.parts), *([path.name] if by_file_name else [])):
        splits = {_CANONICAL[word.lower()] for word in _KEYWORD.findall(name)}
        if len(splits) == 1:
            return splits.pop()
    return None


def without_caches(files: Sequence[Path]) -> list[Path]:
    """Return ``files`` without the caches in folders written by ``Dataset.save_to_disk``: ``datasets`` stores the results of
    ``map`` and ``filter`` next to the data.

    Raises:
        UserError: a data file is missing, or the folder's list of data files cannot be read.
    """
    parts: dict[Path, list[str] | None] = {}
    for folder in dict.fromkeys(file.parent for file in files):
        state = folder / DATASET_STATE
        parts[folder] = _data_files(state) if state.is_file() else None
        for name in parts[folder] or []:
            if not (folder / name).is_file():
                raise UserError.one(str(folder / name), f"missing, although {DATASET_STATE} lists it", "copy it again")
    return [file for file in files if (names := parts[file.parent]) is None or file.name in names]


def _data_files(state: Path) -> list[str]:
    entries = _listed(state, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(name, str) for name in names):
        raise UserError.one(str(state), "damaged: _data_files contains an entry that is not a file", _SAVE)
    return [str(name) for name in names]


def _listed(file: Path, key: str) -> list[Any]:
    """Return the list under ``key`` in a JSON file.

    Raises:
        UserError: the file has no such list.
    """
    contents = read_object(file, _SAVE)
    if key not in contents:
        raise UserError.one(str(file), f"damaged: {key} is missing", _SAVE)
    values = contents[key]
    if not isinstance(values, list):
        raise UserError.one(str(file), f"damaged: {key} is {json_kind(values)}, not an array", _SAVE)
    return values
