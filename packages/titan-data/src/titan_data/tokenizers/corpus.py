"""The text that a tokenizer is trained on: the documents of one or several datasets, read one at a time."""

from __future__ import annotations

import codecs
import glob
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from titan_core.api import DatasetContext, Problem, Ref, UserError
from titan_core.toolkit.reading import DatasetSpec, DocumentReader, FormatSpec, ReadPolicy
from titan_core.toolkit.tokenizers import without_surrogates
from titan_data.local_files import ENDINGS, check_files, plain_suffix

log = logging.getLogger(__name__)

_SAMPLE = 1 << 20


class Corpus:
    """Iterates once over the texts of ``datasets``. If ``limit`` bytes do not suffice for all of them, each dataset gets a
    share by its weight."""

    def __init__(self, datasets: Sequence[DatasetSpec], policy: ReadPolicy, limit: int) -> None:
        self._datasets = [dataset for dataset in datasets if dataset.weight]
        self._policy, self._limit = policy, limit
        self.documents = self.bytes = self.corrupt = 0
        """Documents and bytes of UTF-8 read so far, and corrupt records skipped."""
        self.cut: list[str] = []
        """Names of the datasets that were not read to their end."""
        self.ended = False
        """Whether all texts have been read."""
        self.sample: list[str] = []
        """The first texts, about 1 MB."""

    def __iter__(self) -> Iterator[str]:
        weight = sum(dataset.weight for dataset in self._datasets)
        for dataset in self._datasets:
            size = 0
            for text in self._texts(dataset):
                if size >= self._limit * dataset.weight / weight:
                    self.cut.append(dataset.name)
                    break
                length = len(text.encode())
                size += length
                self.bytes += length
                self.documents += 1
                if self.bytes <= _SAMPLE or not self.sample:
                    self.sample.append(text)
                yield text
        self.ended = True

    def _texts(self, dataset: DatasetSpec) -> Iterator[str]:
        source = dataset.build.load()(dataset.context)
        shard = source.shard(0, 1, 0)
        reader = DocumentReader(self._policy, dataset.name)
        while (document := reader.next(shard)) is not None:
            if not isinstance(document, str):
                why = "contains token ids; a tokenizer is trained on text"
                raise UserError.one(f"dataset {dataset.name!r}", why, "train on the dataset that it was tokenised from")
            yield without_surrogates(document)
        self.corrupt += reader.corrupt


def datasets_of(paths: Iterable[str], text_field: str, format: FormatSpec | None, skip_corrupt: bool) -> list[DatasetSpec]:
    """Return datasets for local files, folders and globs. The names of the files tell their format.

    Raises:
        UserError: a path names no file, or files of no known format or of several. Lists every problem.
    """
    specs: list[DatasetSpec] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            name = _format_of(path)
        except UserError as error:
            problems += error.problems
            continue
        opener = "titan_data.text_files:open_text" if name == "text" else "titan_data.huggingface:open_local"
        context: DatasetContext[None] = DatasetContext(
            section=None, name=name, path=path, text_field=text_field, seed=0, where=f"--corpus {path}",
            split="all" if Path(path).expanduser().is_dir() else None, format=format, skip_corrupt=skip_corrupt,
        )  # fmt: skip
        problems += check_files(context)
        specs.append(DatasetSpec(path, 1.0, Ref(opener), context))
    if problems:
        raise UserError(*problems)
    return specs


def _format_of(path: str) -> str:
    """Return the dataset that reads ``path``, by the endings of its files.

    Files with other endings, such as source code, are text if they look like it and a path or glob names them. In a folder
    they are not read, which is logged.
    """
    where, given = f"--corpus {path}", Path(path).expanduser()
    folder = given.is_dir()
    if folder:
        names = [file for file in given.rglob("*") if file.is_file()]
    else:
        matches = [given] if given.is_file() else map(Path, glob.glob(str(given), recursive=True))
        names = [file for file in matches if file.is_file()]
        if not names:
            raise UserError.one(where, "no such file", "check the path (a file, a folder, or a glob)")
    formats = {ending: name for name, endings in ENDINGS.items() for ending in endings}
    unknown = [file for file in names if plain_suffix(file) not in formats]
    found = sorted({formats[plain_suffix(file)] for file in names if plain_suffix(file) in formats})
    other = ", ".join(sorted({plain_suffix(file) or file.name for file in unknown})[:5])
    if not folder and unknown:
        if not all(map(_looks_like_text, unknown)):
            known = ", ".join(formats)
            why = "its name does not tell the format" if len(names) == 1 else f"matches files of no known format: {other}"
            raise UserError.one(where, why, f"use files that end in {known}, or plain text")
        found = sorted({*found, "text"})
    if len(found) > 1:
        raise UserError.one(where, f"contains files of several formats: {', '.join(found)}", "use a glob for each")
    if not found:
        why = f"the folder contains no file that ends in {', '.join(formats)}"
        raise UserError.one(where, why, f"check the path, or read all its files as text with --corpus '{path}/**/*'")
    if unknown:
        fix = f"add a glob, such as --corpus '{path}/**/*{plain_suffix(unknown[0])}', to read them as text"
        log.warning("%s: not reading %d file(s) of the folder (%s); %s", where, len(unknown), other, fix)
    return found[0]


def _looks_like_text(file: Path) -> bool:
    """Whether ``file`` begins with UTF-8 text."""
    try:
        with file.open("rb") as stream:
            begin = stream.read(4096)
        codecs.getincrementaldecoder("utf-8")().decode(begin)  # a character may be cut at the end
    except (OSError, UnicodeDecodeError):
        return False
    return bool(begin) and b"\0" not in begin
