"""The text that a tokenizer is trained on: the documents of one or several datasets, read one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from titan_core.api.dataset import DatasetContext, DatasetSpec, ReadPolicy
from titan_core.api.errors import Problem, UserError
from titan_core.api.ref import Ref
from titan_core.api.tokenizer import without_surrogates
from titan_core.api.tools.reading import DocumentReader
from titan_data.compressed import COMPRESSED
from titan_data.local_files import ENDINGS, check_files

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


def datasets_of(paths: Iterable[str], text_field: str, format: str | None, skip_corrupt: bool) -> list[DatasetSpec]:
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
    """Return the dataset that reads ``path``, by the endings of the files in it."""
    given = Path(path).expanduser()
    names = [file.name for file in given.rglob("*") if file.is_file()] if given.is_dir() else [given.name]
    endings = {Path(Path(name).stem).suffix if Path(name).suffix in COMPRESSED else Path(name).suffix for name in names}
    found = [name for name, known in ENDINGS.items() if endings & set(known)]
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise UserError.one(
            f"--corpus {path}", f"contains files of several formats: {', '.join(found)}", "use a glob for each"
        )
    known = ", ".join(ending for endings in ENDINGS.values() for ending in endings)
    if given.exists() or "*" in path:
        raise UserError.one(f"--corpus {path}", "its name does not tell the format", f"use files that end in {known}")
    raise UserError.one(f"--corpus {path}", "no such file", "check the path (a file, a folder, or a glob)")
