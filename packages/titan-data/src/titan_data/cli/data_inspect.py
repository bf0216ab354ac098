"""``titan data inspect``: shows the sequences that a recipe trains on, as the model receives them.

A machine without the tokenizer's file or the dataset sees how the data would be read, and a note of what is missing."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

from titan_core.api import CommandContext, Dataset, TextTokenizer, UserError
from titan_core.api.config.sections import DataSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import json_argument, recipe_arguments, small_integer
from titan_core.toolkit.errors import note_of
from titan_core.toolkit.reading import StepRows
from titan_core.toolkit.text import print_json, print_notes, print_table, say
from titan_data.read_cost import read_costs

_EDGE = 12
"""Number of ids to show at each end of a long piece; of its text, four times as many characters."""


@dataclass(frozen=True)
class _Sequence:
    """A sequence, cut at document boundaries."""

    number: int
    dataset: str
    pieces: list[list[int]]
    weights: list[list[float]] | None
    """Weight of each token as a target; ``None``: 1 each."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan data inspect``."""
    recipe_arguments(parser)
    parser.add_argument(
        "--sequences", type=small_integer, default=4, metavar="N", help="number of sequences to show (default: 4)"
    )
    parser.add_argument("--full", action="store_true", help="show all ids and the full text")
    parser.add_argument(
        "--cost", action="store_true", help="report the bytes and requests that data.shuffle makes for a useful byte"
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print the first sequences, and the share of each dataset in them."""
    arguments = context.arguments
    job = context.job(missing_ok=True)
    if not arguments.json:
        say(f"{_plan(job)}\n", flush=True)  # before the data, which may take a while to open
    datasets = job.data.datasets
    descriptions = [] if job.missing else list(_descriptions(context, job))
    costs = read_costs(job) if arguments.cost and not job.missing else {}
    read, notes = _read(context, job, arguments.sequences)
    sequences, tokens = read.sequences[: arguments.sequences], read.tokens
    total = sum(tokens.values())
    packed = {
        "packing": job.config.section(DataSection).packing,
        "documents": read.documents,
        "cut": read.cut / max(read.documents, 1),
        "padding": 1 - total / max(len(read.sequences) * (job.data.plan.seq_len + 1), 1),
    }
    shares = {dataset.name: tokens[dataset.name] / max(total, 1) for dataset in datasets}
    if arguments.json:
        shown = [vars(sequence) for sequence in sequences]
        described = {name: [line for of, line in descriptions if of == name] for name, _ in descriptions}
        counts = {"shares": shares, "tokens": dict(tokens), "packed": packed}
        figures = {"cost": {name: cost.figures for name, cost in costs.items()}} if arguments.cost else {}
        print_json({"datasets": described, "sequences": shown, **counts, **figures, "notes": notes})
        return 0
    for dataset, line in descriptions:
        say(f"{dataset}: {line}")
    if descriptions:
        print()
    if notes:
        print_notes(notes)
        if any("model.tokenizer" in problem.where for problem in job.missing):
            print("To see the text without the tokenizer, add --model.tokenizer byte --model.tokenizer_path=")
        return 0
    if not sequences:
        print("the data ends before the first global batch is complete")
    if special := job.text_tokenizer.describe_special_tokens():
        say("\n".join([*special, ""]))
    for sequence in sequences:
        _print(sequence, job, arguments.full)
    weights = sum(dataset.weight for dataset in datasets)
    cut, padding = f"{packed['cut']:.1%} of {read.documents:,} documents are cut", f"{packed['padding']:.2%}"
    say(f"packing {packed['packing']}: {cut}, and {padding} of the sequences is padding")
    say(f"in {total:,} tokens, {len(read.sequences):,} sequences:")
    print_table(
        ("dataset", "weight", "share", "tokens"),
        [(dataset.name, f"{dataset.weight / weights:.4f}", f"{shares[dataset.name]:.4f}", f"{tokens[dataset.name]:,}")
         for dataset in datasets],
    )  # fmt: skip
    for name, cost in costs.items():
        say(f"{name}, data.shuffle = {job.data.shuffle!r}: {cost}")
    return 0


def _plan(job: AssembledJob) -> str:
    """Return one line that says how the job reads its data."""
    batch, datasets = job.data.plan, ", ".join(dataset.name for dataset in job.data.datasets)
    return (
        f"{datasets}, tokenizer {job.tokenizer.name}: each step reads {batch.global_size} sequences of {batch.seq_len} "
        f"tokens, from {batch.logical_shards} logical shards"
    )


def _descriptions(context: CommandContext, job: AssembledJob) -> Iterator[tuple[str, str]]:
    """Yield the names of datasets, each with a line that says how it is read.

    Raises:
        UserError: a dataset is invalid.
    """
    for dataset in job.data.datasets:
        describe = context.registry.get(Dataset, dataset.context.name).describe
        if describe is not None:
            yield from ((dataset.name, line) for line in describe.call_list(str, dataset.context))


@dataclass
class _Read:
    """The first global batches."""

    sequences: list[_Sequence] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens of each dataset."""
    documents: int = 0
    cut: int = 0


def _read(context: CommandContext, job: AssembledJob, count: int) -> tuple[_Read, list[str]]:
    """Return the result of :func:`_first`, and a note for each thing that this machine lacks. Then there is no sequence.

    Raises:
        UserError: the data is invalid.
    """
    missing = job.missing
    if not missing:
        try:
            return _first(job, context.read_data(job), count), []
        except UserError as error:
            if not all(problem.missing for problem in error.problems):
                raise
            missing = error.problems
    return _Read(), [note_of(problem) for problem in missing]


def _first(job: AssembledJob, batches: Iterator[StepRows], count: int) -> _Read:
    """Return as many global batches as have ``count`` sequences."""
    read = _Read()
    while len(read.sequences) < count and (rows := next(batches, None)) is not None:
        for number, (lengths, dataset) in enumerate(zip(rows.lengths, rows.datasets, strict=True)):
            name = job.data.datasets[dataset].name
            read.tokens[name] += sum(lengths)
            weights = None if rows.weights is None else _cut(rows.weights[number].tolist(), lengths)
            pieces = _cut(rows.tokens[number].tolist(), lengths)
            read.sequences.append(_Sequence(len(read.sequences), name, pieces, weights))
        read.documents, read.cut = rows.documents, rows.cut
    return read


def _cut(row: list[Any], lengths: list[int]) -> list[list[Any]]:
    ends = list(accumulate(lengths))
    return [row[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _print(sequence: _Sequence, job: AssembledJob, full: bool) -> None:
    step, place = divmod(sequence.number, job.data.plan.global_size)
    length = sum(map(len, sequence.pieces))
    documents = f"pieces of {len(sequence.pieces)} documents" if len(sequence.pieces) > 1 else "one document"
    masked = job.config.section(DataSection).document_mask and len(sequence.pieces) > 1
    attention = ", attention within each document" if masked else ""
    say(f"step {step + 1}, sequence {place}: {length} tokens of {sequence.dataset!r}, {documents}{attention}")
    at = 0
    for number, piece in enumerate(sequence.pieces):
        weights = [1.0] * len(piece) if sequence.weights is None else sequence.weights[number]
        trained = sum(weight > 0 for weight in weights)
        loss = "" if trained == len(piece) else f", loss on {trained} of {len(piece)} tokens"
        say(f"  [{at}:{at + len(piece)}] {_ids(piece, full)}{loss}")
        for weight, run in groupby(zip(weights, piece, strict=True), key=lambda pair: pair[0]):
            mark = "" if not loss else "loss    " if weight == 1 else "no loss " if weight == 0 else f"loss x {weight:g} "
            say(f"    {mark}{_text([token for _, token in run], job.text_tokenizer, full)}")
        at += len(piece)
    padding = job.data.plan.seq_len + 1 - at
    if padding:
        say(f"  [{at}:{at + padding}] padding")
    print()


def _ids(ids: list[int], full: bool) -> str:
    if full or len(ids) <= 2 * _EDGE:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:_EDGE]))} ... {' '.join(map(str, ids[-_EDGE:]))}"


def _text(ids: list[int], tokenizer: TextTokenizer, full: bool) -> Any:
    text = tokenizer.decode(ids)
    if full or len(text) <= 8 * _EDGE:
        return repr(text)
    return f"{text[: 4 * _EDGE]!r} ... {text[-4 * _EDGE :]!r}"
