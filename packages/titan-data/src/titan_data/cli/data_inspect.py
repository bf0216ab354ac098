"""``titan data inspect``: what a recipe trains on, as the model gets it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_core.api.command import CommandContext
from titan_core.api.dataset import StepRows
from titan_core.api.job import Job
from titan_core.api.sections import DataSection
from titan_core.api.tokenizer import DescribesMarks, TextTokenizer
from titan_core.api.tools.arguments import few, json_argument, recipe_arguments
from titan_core.api.tools.output import print_json, print_table

_EDGE = 12
"""Ids and characters that are shown of each end of a long piece."""


@dataclass(frozen=True)
class _Sequence:
    """A sequence, by the documents that it holds pieces of."""

    number: int
    dataset: str
    pieces: list[list[int]]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan data inspect``."""
    recipe_arguments(parser)
    parser.add_argument("--sequences", type=few, default=4, metavar="N", help="how many sequences (default: 4)")
    parser.add_argument("--full", action="store_true", help="every id and the whole text")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print the first sequences, and what share of them each dataset has."""
    arguments = context.arguments
    job = context.job()
    sequences, tokens = _first(job, context.read_data(job), arguments.sequences)
    shares = {one.name: tokens[one.name] / max(sum(tokens.values()), 1) for one in job.data.datasets}
    if arguments.json:
        print_json({"sequences": [vars(one) for one in sequences], "shares": shares, "tokens": dict(tokens)})
        return 0
    if not sequences:
        print("the data ends before a whole global batch")
    if isinstance(job.text_tokenizer, DescribesMarks):
        print("\n".join([*job.text_tokenizer.describe_marks(), ""]))
    for one in sequences:
        _print(one, job, arguments.full)
    total = sum(one.weight for one in job.data.datasets)
    print(f"of {sum(tokens.values()):,} tokens in {sum(tokens.values()) // (job.data.plan.seq_len + 1):,} sequences:")
    print_table(
        ("dataset", "weight", "share", "tokens"),
        [(one.name, f"{one.weight / total:.4f}", f"{shares[one.name]:.4f}", f"{tokens[one.name]:,}")
         for one in job.data.datasets],
    )  # fmt: skip
    return 0


def _first(job: Job, batches: Iterator[StepRows], wanted: int) -> tuple[list[_Sequence], Counter[str]]:
    """The first ``wanted`` sequences, and the tokens of each dataset in the global batches that they are in."""
    sequences: list[_Sequence] = []
    tokens: Counter[str] = Counter()
    while len(sequences) < wanted and (rows := next(batches, None)) is not None:
        for row, lengths, dataset in zip(rows.tokens.tolist(), rows.lengths, rows.datasets, strict=True):
            name = job.data.datasets[dataset].name
            tokens[name] += len(row)
            pieces, at = [], 0
            for length in lengths:
                pieces.append(row[at : at + length])
                at += length
            sequences.append(_Sequence(len(sequences), name, pieces))
    return sequences[:wanted], tokens


def _print(sequence: _Sequence, job: Job, full: bool) -> None:
    step, place = divmod(sequence.number, job.data.plan.global_size)
    length = sum(map(len, sequence.pieces))
    many = f"pieces of {len(sequence.pieces)} documents" if len(sequence.pieces) > 1 else "one document"
    masked = (
        ", attention inside of each" if job.config.section(DataSection).document_mask and len(sequence.pieces) > 1 else ""
    )
    print(f"step {step + 1}, sequence {place}: {length} tokens of {sequence.dataset!r}, {many}{masked}")
    at = 0
    for piece in sequence.pieces:
        print(f"  [{at}:{at + len(piece)}] {_ids(piece, full)}")
        print(f"    {_text(piece, job.text_tokenizer, full)}")
        at += len(piece)
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
