"""``titan data step``: lists the documents that a step of a run used."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from titan_core.api import CommandContext
from titan_core.toolkit.arguments import json_argument, step_count
from titan_core.toolkit.text import print_json, print_table, say
from titan_data.provenance.documents import UsedDocument

if TYPE_CHECKING:
    from titan_data.provenance.recorded_run import RecordedRun


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan data step``."""
    parser.add_argument("run", metavar="RUN", help="run directory (job.dump_folder)")
    parser.add_argument("step", type=step_count, metavar="N", help="number of the step, from 1")
    parser.add_argument(
        "--loss", action="store_true",
        help="also compute the loss of each, with the weights of the newest checkpoint of a step before N",
    )  # fmt: skip
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print the documents of a step. Imports torch only to compute their losses.

    Raises:
        UserError: the run or its data cannot be read, or has changed; or their losses cannot be computed.
    """
    from titan_data.provenance.documents import documents_of_step
    from titan_data.provenance.recorded_run import open_run

    arguments = context.arguments
    opened = open_run(context, arguments.run)
    if arguments.step > opened.last:
        note(f"the run has recorded {opened.last} steps; these are the documents that step {arguments.step} would use")
    if arguments.loss:
        _print_losses(context, opened)
        return 0
    found = documents_of_step(opened, arguments.step, note)
    if arguments.json:
        print_json({"step": arguments.step, "documents": [vars(one) for one in found]})
        return 0
    print_table(
        ("row", "dataset", "epoch", "tokens", "document"),
        [(str(one.row), one.dataset, str(one.epoch + 1), tokens_of(one), place_of(one)) for one in found],
    )
    return 0


def _print_losses(context: CommandContext, opened: RecordedRun) -> None:
    from titan_data.provenance.losses import losses_of_step  # imports torch

    step, found = context.arguments.step, losses_of_step(context, opened, context.arguments.step, note)
    if context.arguments.json:
        documents = [
            {**vars(one.document), "loss": one.mean, "targets": one.targets, "weight": one.weight} for one in found.documents
        ]
        print_json({"step": step, "weights_of_step": found.weights_of, "loss": found.mean, "documents": documents})
        return
    print_table(
        ("row", "dataset", "epoch", "tokens", "loss", "targets", "document"),
        [
            (
                str(one.document.row),
                one.document.dataset,
                str(one.document.epoch + 1),
                tokens_of(one.document),
                loss_of(one.mean),
                str(one.targets),
                place_of(one.document),
            )
            for one in found.documents
        ],
    )
    targets = sum(one.targets for one in found.documents)
    exact = found.weights_of == step - 1
    trained = "as in training" if exact else f"but training had taken {step - 1} steps"
    say(f"loss {loss_of(found.mean)} over {targets:,} targets, with the weights after step {found.weights_of}, {trained}")


def loss_of(mean: float | None) -> str:
    """Return a mean loss, of no target perhaps."""
    return "-" if mean is None else f"{mean:.4f}"


def note(line: str) -> None:
    """Print a line that does not belong to the result."""
    say(f"titan: {line}", file=sys.stderr, flush=True)


def tokens_of(used: UsedDocument) -> str:
    """Return which tokens of the document were used: the first and the last, counted from 0."""
    return f"{used.first_token}..{used.first_token + used.tokens - 1} of {used.of}"


def place_of(used: UsedDocument) -> str:
    """Return where the document is, as far as it is known."""
    return used.place or "a document of unknown place"
