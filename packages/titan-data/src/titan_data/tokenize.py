"""Making a tokenised dataset (:mod:`titan_data.tokenized`): in parallel, part by part, and resuming where it was
interrupted. A part is whole once its ``.idx`` is there, and the dataset once ``tokenized.json`` is."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from titan_core.api.dataset import DatasetSpec, DocumentSource, StreamSpec, WeightedTokens
from titan_core.api.errors import UserError
from titan_core.api.tokenizer import TextTokenizer, fingerprint, token_ids
from titan_core.api.tools.reading import DocumentReader
from titan_core.api.tools.worker_process import ENDED, end_now, worker_processes
from titan_data.tokenized import ENDS, INDEX, Part, TokenizedIndex, token_dtype

PLAN = "plan.json"


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    parts: int
    """Parts that are whole."""
    of: int
    tokens: int
    """Tokens written, those of unfinished parts included."""
    corrupt: int
    """Corrupt records left out by this run."""


def tokenize(
    spec: StreamSpec, dataset: DatasetSpec, tokenizer_name: str, folder: Path, parts: int, workers: int
) -> Iterator[Progress]:
    """Write ``dataset``'s tokens to ``folder``; yields every half second.

    Args:
        parts: into how many it is divided.
        workers: processes.

    Raises:
        UserError: the dataset cannot be read, or another one was begun in ``folder``.
    """
    tokenizer = spec.tokenizer.load()(spec.tokenizer_context)
    # What goes to which part depends on no job's seed.
    dataset = replace(dataset, context=replace(dataset.context, seed=0))
    source = dataset.build.load()(dataset.context)
    if source.num_documents is not None:
        parts = max(1, min(parts, source.num_documents))
    mark, dtype = fingerprint(tokenizer), token_dtype(tokenizer.vocab_size)
    context = dataset.context
    plan = {"dataset": context.name, "path": context.path, "split": context.split, "text_field": context.text_field,
            "format": context.format,
            "tokenizer": mark, "documents": source.num_documents, "parts": parts}  # fmt: skip
    _begin(folder, plan)
    names = [f"part-{number:05d}" for number in range(parts)]
    missing = [number for number, name in enumerate(names) if not (folder / f"{name}.idx").exists()]
    corrupt = 0
    pool = worker_processes(max(1, min(workers, len(missing))))
    try:
        futures = {pool.submit(_write_part, spec, dataset, str(folder), number, parts, dtype) for number in missing}
        while True:
            done, futures = wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
            corrupt += sum(future.result() for future in done)
            yield Progress(parts - len(futures), parts, _written(folder, dtype), corrupt)
            if not futures:
                break
    except BrokenProcessPool:
        raise UserError.one("a worker", ENDED, "give fewer --workers; it resumes from here") from None
    finally:
        end_now(pool)  # after an error there are some at work; parts are written again
    size = numpy.dtype(dtype).itemsize
    whole = [
        Part(name, (folder / f"{name}.idx").stat().st_size // ENDS.itemsize, (folder / f"{name}.bin").stat().st_size // size)
        for name in names
    ]
    TokenizedIndex(dtype, tokenizer_name, mark, tuple(whole)).write(folder)
    (folder / PLAN).unlink()


def _begin(folder: Path, plan: Mapping[str, object]) -> None:
    """Make the folder, or resume in it.

    Raises:
        UserError: it holds something else.
    """
    file = folder / PLAN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX).exists():
            raise UserError.one(str(folder), "holds a whole tokenised dataset already", "name another folder, or remove it")
        if not file.exists() and any(folder.iterdir()):
            raise UserError.one(str(folder), "is not empty", "name a new folder")
        if file.exists():
            begun = json.loads(file.read_text(encoding="utf-8"))
            differ = [f"{key} {begun.get(key)!r}" for key, value in plan.items() if begun.get(key) != value]
            if differ:
                why = f"another tokenisation was begun here, of {', '.join(differ)}"
                raise UserError.one(str(folder), why, "resume that one, name another folder, or remove it")
        else:
            partial = folder.parent / f".{folder.name}.{PLAN}"
            partial.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
            partial.replace(file)
    except (OSError, ValueError) as error:
        raise UserError.one(str(folder), f"cannot be written: {error}", "choose another folder") from error


def _write_part(spec: StreamSpec, dataset: DatasetSpec, folder: str, number: int, parts: int, dtype: str) -> int:
    """In a worker: write one part; how many corrupt records were left out of it."""
    tokenizer, source = _opened(spec, dataset)
    shard = source.shard(number, parts, 0)
    reader = DocumentReader(spec.policy, dataset.name)
    path = Path(folder) / f"part-{number:05d}"
    ends: list[int] = []
    written, vocab_size = 0, tokenizer.vocab_size
    try:
        with path.with_suffix(".bin.partial").open("wb") as file:
            while (document := reader.next(shard)) is not None:
                if isinstance(document, WeightedTokens):
                    why = "its documents weigh their tokens, and a tokenized dataset has no place for weights"
                    raise UserError.one(f"dataset {dataset.name!r}", why, "train on the dataset itself")
                tokens = tokenizer.encode_document(document) if isinstance(document, str) else document
                file.write(token_ids(tokens, vocab_size).astype(dtype).tobytes())
                written += len(tokens)
                ends.append(written)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".bin.partial").replace(path.with_suffix(".bin"))
        with path.with_suffix(".idx.partial").open("wb") as file:
            file.write(numpy.array(ends, ENDS).tobytes())
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".idx.partial").replace(path.with_suffix(".idx"))
    except ValueError as error:
        where = f"dataset {dataset.name!r}, part {number}, document {len(ends)}"
        raise UserError.one(where, str(error), "fix the plugin of the dataset or of the tokenizer") from None
    except OSError as error:
        raise UserError.one(
            str(path), f"cannot be written: {error.strerror or error}", "make room; it resumes from here"
        ) from error
    return reader.corrupt


@functools.cache
def _opened(spec: StreamSpec, dataset: DatasetSpec) -> tuple[TextTokenizer, DocumentSource]:
    """Once in each worker."""
    return spec.tokenizer.load()(spec.tokenizer_context), dataset.build.load()(dataset.context)


def _written(folder: Path, dtype: str) -> int:
    """Tokens in the folder's files."""
    sizes = 0
    for file in folder.glob("*.bin*"):
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:
            continue  # renamed since
    return sizes // numpy.dtype(dtype).itemsize
