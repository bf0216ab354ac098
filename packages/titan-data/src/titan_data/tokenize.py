"""Writes a tokenised dataset (:mod:`titan_data.tokenized`) in parallel, part by part, and resumes after an interruption. A
part is complete once its ``.idx`` file exists, and the dataset once ``tokenized.json`` exists.

Two workers may write a part at the same time, if a cluster has given one of them up. Each writes files of its own, and their
contents are the same.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from titan_core.api import DatasetContext, DocumentSource, TextTokenizer, UserError, WeightedTokens
from titan_core.api.data.dataset import encode_text
from titan_core.api.data.tokenizer import token_ids
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.plain_json import read_object
from titan_core.toolkit.reading import DatasetSpec, DocumentReader, StreamSpec
from titan_data.engines import Engine
from titan_data.tokenized import ENDS, INDEX, Part, TokenizedIndex, token_dtype

PLAN = "plan.json"


@dataclass(frozen=True)
class Progress:
    """Progress of a tokenisation."""

    parts: int
    """Number of complete parts."""
    of: int
    """Total number of parts."""
    tokens: int
    """Number of tokens written, including those of incomplete parts."""
    corrupt: int
    """Number of corrupt records that this run skipped."""
    machines: Mapping[str, int]
    """Number of parts that this run has completed, by machine."""


def tokenize(
    spec: StreamSpec, dataset: DatasetSpec, tokenizer_name: str, folder: Path, parts: int, engine: Engine
) -> Iterator[Progress]:
    """Write the tokens of ``dataset`` to ``folder``; yield the progress every half second.

    Args:
        parts: number of parts to divide the dataset into; lowered to the number of documents.
        engine: what writes the parts. The result does not depend on it.

    Raises:
        UserError: the dataset cannot be read, or ``folder`` contains the tokenisation of another dataset.
    """
    tokenizer = spec.tokenizer.load()(spec.tokenizer_context)
    # The assignment of documents to parts must not depend on the seed of a job.
    dataset = replace(dataset, context=replace(dataset.context, seed=0, shuffle="documents"))
    source = dataset.build.load()(dataset.context)
    if source.num_documents is not None:
        parts = max(1, min(parts, source.num_documents))
    mark, dtype = tokenizer.fingerprint(), token_dtype(tokenizer.vocab_size)
    context = dataset.context
    plan = {"dataset": context.name, "path": context.path, "split": context.split, "text_field": context.text_field,
            "format": _format_of(context),
            "tokenizer": mark, "documents": source.num_documents, "parts": parts}  # fmt: skip
    _begin(folder, plan)
    names = [f"part-{number:05d}" for number in range(parts)]
    missing = [number for number, name in enumerate(names) if not (folder / f"{name}.idx").exists()]
    task = PartTask(spec, dataset, str(folder.resolve()), parts, dtype, mark, source.num_documents)
    corrupt, machines = 0, Counter[str]()
    yield Progress(parts - len(missing), parts, _written(folder, dtype), corrupt, dict(machines))
    for written in engine.run(task, missing):
        corrupt += sum(one.corrupt for one in written)
        machines.update(one.machine for one in written)
        complete = parts - len(missing) + machines.total()
        yield Progress(complete, parts, _written(folder, dtype), corrupt, dict(machines))
    size = numpy.dtype(dtype).itemsize
    index = [
        Part(name, (folder / f"{name}.idx").stat().st_size // ENDS.itemsize, (folder / f"{name}.bin").stat().st_size // size)
        for name in names
    ]
    TokenizedIndex(dtype, tokenizer_name, mark, tuple(index)).write(folder)
    (folder / PLAN).unlink()


def _format_of(context: DatasetContext[Any]) -> str | None:
    """Return the format with the version of its code: parts that different code wrote do not belong together."""
    spec = context.format
    return None if spec is None else spec.text if spec.convert is None else f"{spec.text}, {spec.convert.origin}"


def _begin(folder: Path, plan: Mapping[str, object]) -> None:
    """Create the folder with its plan, or check that the plan in it is the same.

    Raises:
        UserError: the folder contains anything else, or cannot be written.
    """
    file = folder / PLAN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX).exists():
            raise UserError.one(
                str(folder), "already contains a complete tokenised dataset", "name another folder, or remove this one"
            )
        if not file.exists() and any(folder.iterdir()):
            raise UserError.one(str(folder), "is not empty", "name a new folder")
        if file.exists():
            for left in folder.glob("*.partial"):
                left.unlink()
            begun = read_object(file, "remove the folder, and tokenise again")
            differ = [f"{key} {begun.get(key)!r}" for key, value in plan.items() if begun.get(key) != value]
            if differ:
                why = f"contains an unfinished tokenisation with other settings: {', '.join(differ)}"
                raise UserError.one(str(folder), why, "resume that one, name another folder, or remove this one")
        else:
            with atomic_write(file) as partial:
                partial.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError.one(str(folder), f"cannot be written: {error}", "name another folder") from error


@dataclass(frozen=True)
class PartTask:
    """Writes single parts, in a worker."""

    spec: StreamSpec
    dataset: DatasetSpec
    folder: str
    """Absolute path of the output."""
    parts: int
    dtype: str
    tokenizer: str
    """Fingerprint of the tokenizer."""
    documents: int | None
    """Number of documents of the dataset, if it is known."""

    def __call__(self, number: int) -> int:
        """Write part ``number``; return the number of corrupt records that were skipped.

        Raises:
            UserError: it cannot be written, or this machine has another dataset or tokenizer than the command.
        """
        tokenizer, source = _opened(self.spec, self.dataset)
        self._check(tokenizer, source)
        shard = source.shard(number, self.parts, 0)
        reader = DocumentReader(self.spec.policy, self.dataset.name)
        path = Path(self.folder) / f"part-{number:05d}"
        writer = uuid.uuid4().hex
        ends: list[int] = []
        written, vocab_size = 0, tokenizer.vocab_size
        try:
            tokens_file, index_file = (path.with_suffix(f".{kind}.{writer}.partial") for kind in ("bin", "idx"))
            with tokens_file.open("wb") as file:
                while (document := reader.next(shard)) is not None:
                    if isinstance(document, WeightedTokens):
                        why = "its documents have token weights, which a tokenised dataset cannot store"
                        raise UserError.one(f"dataset {self.dataset.name!r}", why, "train on the dataset itself")
                    tokens = encode_text(tokenizer, document) if isinstance(document, str) else document
                    file.write(token_ids(tokens, vocab_size).astype(self.dtype).tobytes())
                    written += len(tokens)
                    ends.append(written)
                file.flush()
                os.fsync(file.fileno())
            with index_file.open("wb") as file:
                file.write(numpy.array(ends, ENDS).tobytes())
                file.flush()
                os.fsync(file.fileno())
            tokens_file.replace(path.with_suffix(".bin"))
            index_file.replace(path.with_suffix(".idx"))
        except ValueError as error:
            where = f"dataset {self.dataset.name!r}, part {number}, document {len(ends)}"
            raise UserError.one(where, str(error), "fix the plugin of the dataset or of the tokenizer") from None
        except OSError as error:
            fix = "free disk space, and run the same command to resume"
            raise UserError.one(str(path), f"cannot be written: {error.strerror or error}", fix) from error
        return reader.corrupt

    def _check(self, tokenizer: TextTokenizer, source: DocumentSource) -> None:
        machine = f"machine {platform.node()}"
        if not (Path(self.folder) / PLAN).exists():
            why, fix = f"{machine} does not see it", "name a folder of a file system that all machines share"
            raise UserError.one(f"--output {self.folder}", why, fix)
        if tokenizer.fingerprint() != self.tokenizer:
            fix = "install the same packages, and copy the same files, on all machines"
            raise UserError.one(machine, "has another tokenizer than the command", fix)
        if source.num_documents != self.documents:
            why = f"has {source.num_documents} documents of dataset {self.dataset.name!r}, the command {self.documents}"
            raise UserError.one(machine, why, "let all machines read the same files")


@functools.cache
def _opened(spec: StreamSpec, dataset: DatasetSpec) -> tuple[TextTokenizer, DocumentSource]:
    """Return the tokenizer and the opened dataset; built once in each worker."""
    return spec.tokenizer.load()(spec.tokenizer_context), dataset.build.load()(dataset.context)


def _written(folder: Path, dtype: str) -> int:
    """Return the number of tokens in the folder's files."""
    sizes = 0
    for file in folder.glob("*.bin*"):
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:
            continue  # renamed meanwhile
    return sizes // numpy.dtype(dtype).itemsize
