"""Finds the files of a local dataset, and checks them cheaply before a job starts. Does not import torch or ``datasets``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_core.api import CorruptRecord, DatasetContext, ExcludedRecord, Problem, UserError
from titan_core.toolkit.files import open_file
from titan_core.toolkit.reading import ALL_SPLITS
from titan_core.toolkit.text import shorten
from titan_data.compressed import COMPRESSED, Damaged, damaged, decompress
from titan_data.limits import LOCATED, endless, too_large
from titan_data.records import FIELD_FIX, Reader, check_format, missing_field, parsed_record, text_of
from titan_data.splits import files_of_split, without_caches
from titan_data.storage import (
    files_below,
    fixed_part,
    kind_of,
    located,
    matching,
    nothing_at,
    reading,
    require_unicode,
    unreadable,
)

ENDINGS = {
    "json": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "csv": (".csv", ".tsv"),
    "text": (".txt", ".text", ".md"),
}

_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
EMPTY, EMPTY_FIX = "the dataset is empty", "name a file that contains documents"


def find_files(context: DatasetContext[Any], endings: tuple[str, ...]) -> list[Path]:
    """Return the files that ``context.path`` (a file, a folder, or a glob) names, sorted. From a folder, only files with one
    of ``endings``, compressed or not. From a folder or glob with splits, only files of the requested split.

    Raises:
        UserError: the path is missing or names no file, or the split does not exist.
    """
    if not context.path:
        raise UserError.one(
            context.where, f"dataset {context.name!r} needs the path to its files", "set training.dataset_path"
        )
    path = located(context.path, context.where)
    kind = kind_of(path)
    if kind == "file":  # even if its name looks like a glob
        if context.split is not None:
            why = f"{context.split_key} is {context.split!r}, but the path names a single file"
            raise UserError.one(context.where, why, "drop the key, or name a folder")
        return [path]
    if kind == "folder":
        root, found = path, [file for file in files_below(path) if plain_suffix(file) in endings]
        why = f"the folder contains no file that ends in {' or '.join(endings)}"
        nothing = Problem(context.where, why, "check the path")
    else:
        root, found = fixed_part(path), matching(path)
        nothing = Problem(context.where, nothing_at(path), "check the path (a file, a folder, or a glob)", missing=True)
    files = without_caches(sorted(found))
    if not files:
        raise UserError(nothing)
    require_unicode(files)
    return files_of_split(files, root, context)


def check_files(context: DatasetContext[None]) -> list[Problem]:
    """Check that the files exist, are not all empty, and have the text field in their first record."""
    try:
        with reading(context.path or ""):
            files = find_files(context, ENDINGS[context.name])
        if not any(file.stat().st_size for file in files):
            return [_empty(context)]
        problems = check_format(context)
        if context.name == "json" and not problems:
            problems += _check_json(files, context)
    except UserError as error:
        return list(error.problems)
    except OSError as error:
        return [unreadable(context, error)]
    return problems


def check_hub(context: DatasetContext[None]) -> list[Problem]:
    """Check the dataset's name and split without the network."""
    if context.name == "hub" and not context.path:
        return [Problem(context.where, "dataset 'hub' needs the name of a dataset", "set training.dataset_path")]
    if context.path is not None:
        try:
            require_hub_name(context.path.partition(":")[0], context)
        except UserError as error:
            return list(error.problems)
    if context.split == ALL_SPLITS:
        return [Problem(f"{context.split_key} = {ALL_SPLITS!r}", "cannot stream all splits at once", "name one split")]
    return check_format(context)


def require_hub_name(name: str, context: DatasetContext[Any]) -> None:
    """Require that ``name`` is one of the hub. ``datasets`` would also open folders of this machine, and takes other names
    for those of its readers, one of which unpickles files in some versions.

    Raises:
        UserError: it is not.
    """
    if not _HUB_NAME.fullmatch(name) or ".." in name:
        why = f"{shorten(name)!r} is not the name of a dataset on the hub"
        raise UserError.one(context.where, why, "write organisation/name, or organisation/name:configuration")
    if Path(name).exists():
        why = f"{name!r} is a file or folder here, and dataset {context.name!r} reads from the hub only"
        raise UserError.one(context.where, why, "set training.dataset to the form of the files, or rename the folder")


def begins_lines(line: bytes) -> bool:
    """Whether a JSON file whose first line that is not blank is ``line`` contains one record per line, not one array or
    indented objects."""
    return not (line.lstrip().startswith(b"[") or line.strip() == b"{")


def first_line(file: Path, limit: int) -> tuple[int, bytes]:
    """Return the number and content of the first line that is not blank; ``(0, b"")`` if there is none. A file without lines
    may have one without an end, of which the beginning is returned.

    Args:
        limit: bytes of a record.

    Raises:
        UserError: the file is compressed, and is damaged before the end of that line; or the line does not end.
    """
    longest = LOCATED * limit
    try:
        found = next(
            ((number, line) for number, line in enumerate(_lines(file, limit, longest), 1) if line.strip()), (0, b"")
        )
    except Damaged as error:
        raise damaged(file, error) from None
    if len(found[1]) > longest and begins_lines(found[1]):
        raise endless(f"{file}:{found[0]}", longest, "the line")
    return found


def _parsed(line: bytes, place: str, context: DatasetContext[Any]) -> Any:
    """
    Raises:
        CorruptRecord: it is too long, or not JSON.
    """
    if len(line) > context.max_record_bytes:
        raise too_large(place, len(line), context.max_record_bytes, "the line")
    return parsed_record(line, place)


def first_record(context: DatasetContext[Any]) -> tuple[Any, str] | None:
    """Return the first record of the JSON lines at the dataset's path, and its place. ``None`` for files with one JSON array
    or indented objects, whose first one is not looked for.

    Raises:
        CorruptRecord: it is too long, or not JSON.
        UserError: all files are empty.
    """
    for file in find_files(context, ENDINGS["json"]):
        number, line = first_line(file, context.max_record_bytes)
        if not line:
            continue
        if not begins_lines(line):
            return None
        place = f"{file}:{number}"
        return _parsed(line, place, context), place
    raise UserError.one(context.where, EMPTY, EMPTY_FIX)


def check_first(context: DatasetContext[Any], form: str | None, read: Reader) -> None:
    """Read the first record of JSON lines, unless corrupt ones are skipped.

    Raises:
        CorruptRecord: it has no document.
        UserError: all files are empty.
    """
    if form == "json" and not context.skip_corrupt and (first := first_record(context)) is not None:
        with suppress(ExcludedRecord):  # others may be trained on
            read(*first)


def form_of(context: DatasetContext[Any], forms: Sequence[str], contents: str) -> str | None:
    """Return which of ``forms`` (keys of :data:`ENDINGS`) the files at the dataset's path have; ``None`` for a dataset on
    the hub.

    Args:
        contents: what the files must have, for errors.

    Raises:
        UserError: the path is missing, or names no file, or files of several forms.
    """
    endings = tuple(ending for form in forms for ending in ENDINGS[form])
    path = Path(context.path or "").expanduser()
    if _ON_HUB.fullmatch(context.path or "") and not path.exists() and plain_suffix(path) not in endings:
        return None
    files = find_files(context, endings)
    found = {form for file in files for form in forms if plain_suffix(file) in ENDINGS[form]}
    if len(found) != 1:
        why = "contains files of several forms" if found else f"is not a file that ends in {' or '.join(endings)}"
        raise UserError.one(context.where, why, f"name files of one form, {contents}")
    return found.pop()


def _lines(file: Path, limit: int, longest: int) -> Iterator[bytes]:
    """Yield the lines of a file, compressed or not, up to the first that is longer than ``longest``, of which the beginning
    is the last.

    Args:
        limit: see :func:`~titan_data.compressed.decompress`.
    """
    if file.suffix not in COMPRESSED:
        with open_file(file) as stream:
            while line := stream.readline(longest + 1):
                yield line
                if len(line) > longest:
                    return
        return
    rest: list[bytes] = []
    for piece in decompress(file, limit):
        *ended, last = piece.split(b"\n")
        for line in ended:
            yield b"".join([*rest, line, b"\n"])
            rest.clear()
        rest.append(last)
        if sum(map(len, rest)) > longest:
            break
    yield b"".join(rest)


def _check_json(files: list[Path], context: DatasetContext[Any]) -> Iterator[Problem]:
    """Check the first record. Those of a JSON array, and indented ones, are found when it is opened."""
    for file in files:
        number, line = first_line(file, context.max_record_bytes)
        if not line:
            continue
        if not begins_lines(line) or context.skip_corrupt:
            return
        try:
            record = _parsed(line, f"{file}:{number}", context)
        except CorruptRecord as error:
            yield Problem(error.place, error.why, error.fix)
            return
        if not isinstance(record, dict):
            yield Problem(f"{file}:{number}", "not a JSON object", 'each line must be an object like {"text": "..."}')
        elif context.format is not None:
            yield from _check_formatted(record, context, f"{file}:{number}")
        elif context.text_field not in record:
            yield _no_field(f"{file}:{number}", context.text_field, list(record))
        return
    yield _empty(context)


def _check_formatted(record: Any, context: DatasetContext[Any], place: str) -> Iterator[Problem]:
    try:
        text_of(record, context, place)
    except CorruptRecord as error:
        yield Problem(error.place, error.why, error.fix)


def plain_suffix(file: Path) -> str:
    """Return the suffix of ``file`` before it was compressed."""
    return file.with_suffix("").suffix if file.suffix in COMPRESSED else file.suffix


def _empty(context: DatasetContext[Any]) -> Problem:
    return Problem(context.where, EMPTY, EMPTY_FIX)


def _no_field(where: str, field: str, names: list[str]) -> Problem:
    return Problem(where, missing_field(field, names), FIELD_FIX)
