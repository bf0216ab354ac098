"""Which files of a local dataset belong to which split. Free of torch and of ``datasets``.

A folder says it in one of these ways, the first that applies:

* ``dataset_dict.json``, which ``DatasetDict.save_to_disk`` writes: a folder a split.
* Names as the Hugging Face hub lays datasets out: ``data/SPLIT-00000-of-00003.parquet``; folders or files named with one of
  :data:`KEYWORDS` (``train/``, ``test-0.jsonl``).
"""

from __future__ import annotations

import logging
import multiprocessing
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_core.api.dataset import ALL_SPLITS, DatasetContext
from titan_core.api.errors import UserError
from titan_core.api.tools.plain_json import read_object

log = logging.getLogger(__name__)

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""What splits are called, by canonical name. As in ``datasets``, a keyword counts between separators (``c4-test.03``)."""

DATASET_DICT, DATASET_STATE = "dataset_dict.json", "state.json"
_SAVE = "save the dataset again"

_CANONICAL = {word: split for split, words in KEYWORDS.items() for word in words}
_KEYWORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_CANONICAL)})(?=$|[-._ 0-9])", re.IGNORECASE)
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\b")


def files_of_split(files: Sequence[Path], root: Path, context: DatasetContext[None]) -> list[Path]:
    """Those of ``files``, which were found below ``root``, that belong to the requested split.

    Raises:
        UserError: there is no such split, or it is not clear which one is meant.
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
    if multiprocessing.parent_process() is None:  # not again in each worker
        log.info("dataset %s: reading split %r of %s", context.path, canonical, ", ".join(names))
    return [file for file, label in zip(files, labels, strict=True) if label == canonical]


def _default(names: Sequence[str], others: Sequence[Path], context: DatasetContext[None]) -> str | None:
    """The split that is read where none was requested; ``None`` where that is not clear."""
    if context.default_split == "validation":
        return "test" if names == ["test"] else "validation"
    # Files beside the splits might be more of the training data, or of another split.
    return None if others else "train"


def _unclear(names: Sequence[str], others: Sequence[Path], root: Path, context: DatasetContext[None]) -> UserError:
    found = f"splits {', '.join(names)}" if names else "no splits that folders or files are named for"
    if others and names:
        found += f", and files of none ({others[0].relative_to(root)})"
    if context.split is not None:
        why = f"{context.split_key} is {context.split!r}, and there are {found}"
    else:
        why = f"there are {found}, and it is not clear which to read"
    choices = ", ".join([*names, f"or {ALL_SPLITS!r} for everything"])
    return UserError.one(context.where, why, f"set {context.split_key} to one of {choices}" if names else "drop the key")


def _labels(files: Sequence[Path], root: Path, *, by_file_name: bool) -> list[str | None]:
    """Of each file the split, ``None`` where its name says nothing."""
    below = [file.relative_to(root) for file in files]
    listed = _listed(root / DATASET_DICT, "splits") if (root / DATASET_DICT).is_file() else None
    if listed is not None:
        return [_CANONICAL.get(path.parts[0], path.parts[0]) if path.parts[0] in listed else None for path in below]
    shards = [_shard_label(path, root) for path in below]
    if len(set(shards) - {None}) > 1:
        return [label or _name_label(path, by_file_name) for label, path in zip(shards, below, strict=True)]
    return [_name_label(path, by_file_name) for path in below]


def _shard_label(path: Path, root: Path) -> str | None:
    """Of ``data/SPLIT-00000-of-00003.parquet``, any name of a split."""
    folder = path.parent.name or root.name
    match = _SHARD.match(path.name) if folder == "data" else None
    return _CANONICAL.get(match[1], match[1]) if match is not None else None


def _name_label(path: Path, by_file_name: bool) -> str | None:
    """By the innermost folder that is named for a split, or by the file's name. A name of two splits says nothing."""
    for name in (*reversed(path.parent.parts), *([path.name] if by_file_name else [])):
        splits = {_CANONICAL[word.lower()] for word in _KEYWORD.findall(name)}
        if len(splits) == 1:
            return splits.pop()
    return None


def without_caches(files: Sequence[Path]) -> list[Path]:
    """``files`` without those that lie in a folder of ``Dataset.save_to_disk`` and are no part of its data: ``datasets``
    keeps the results of ``map`` and ``filter`` there too.

    Raises:
        UserError: a part of a dataset is missing, or a folder's list of its parts cannot be read.
    """
    parts: dict[Path, list[str] | None] = {}
    for folder in dict.fromkeys(file.parent for file in files):
        state = folder / DATASET_STATE
        parts[folder] = _data_files(state) if state.is_file() else None
        for name in parts[folder] or []:
            if not (folder / name).is_file():
                raise UserError.one(str(folder / name), f"it is missing, and {DATASET_STATE} lists it", "copy it again")
    return [file for file in files if (names := parts[file.parent]) is None or file.name in names]


def _data_files(state: Path) -> list[str]:
    entries = _listed(state, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(name, str) for name in names):
        raise UserError.one(str(state), "_data_files lists something other than files", _SAVE)
    return [str(name) for name in names]


def _listed(file: Path, key: str) -> list[Any]:
    """The list under ``key`` of a JSON file.

    Raises:
        UserError: there is none.
    """
    contents = read_object(file, _SAVE)
    if key not in contents:
        raise UserError.one(str(file), f"damaged: it has no {key}", _SAVE)
    values = contents[key]
    if not isinstance(values, list):
        raise UserError.one(str(file), f"damaged: {key} is {type(values).__name__}, not a list", _SAVE)
    return values
