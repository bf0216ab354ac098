"""The recipe that ``titan plan --model`` plans: one that pre-trains a model from random weights."""

from __future__ import annotations

import argparse
from typing import Any, Final

from titan_core.api import CommandContext, Problem, UserError
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.api.config.sections import ModelSection, TrainingSection
from titan_core.toolkit.arguments import integer
from titan_simulate.plan.kinds import GLOBAL_BATCH

TOKENS_PER_STEP: Final = 2**22
"""Tokens of a step, if the command line does not set the global batch: 4M, as at the start of Llama 3 405B (arXiv
2407.21783, section 3.4.1)."""


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that stand for a recipe."""
    parser.add_argument(
        "--model", metavar="MODEL",
        help="in place of a recipe: pre-train this model. Its name on the hub, a folder with config.json, or FAMILY/FLAVOR "
        "(llama3/8B)",
    )  # fmt: skip
    parser.add_argument(
        "--seq-len", type=integer(1, MOST_STEPS), metavar="L", help="length of sequences for --model, in tokens"
    )


def recipe_of_model(context: CommandContext) -> dict[str, dict[str, Any]]:
    """Return the recipe of the model that the command line names. May import torch.

    Raises:
        UserError: there is no such model, or no installed plugin supports it.
    """
    options = context.arguments
    where = f"--model {options.model}"
    try:
        described = context.models.describe(options.model)
    except UserError as error:
        problems = [Problem(where if one.where == options.model else one.where, one.why, one.fix) for one in error.problems]
        raise UserError(*problems) from None
    training = {
        "dataset": "stdlib",
        "seq_len": options.seq_len,
        "local_batch_size": 1,
        "global_batch_size": default_batch(options.seq_len, options.gpus or 1),
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    model = {"tokenizer": "byte", **described[ModelSection.section]}
    return {
        **{name: dict(table) for name, table in described.items()},
        ModelSection.section: model,
        TrainingSection.section: training,
    }


def default_batch(seq_len: int, gpus: int) -> int:
    """Return the number of sequences of a step: at most :data:`TOKENS_PER_STEP`, as the odd factor of the number of devices,
    which data parallelism may need to divide it, times a power of two."""
    odd = gpus // (gpus & -gpus)
    sequences = odd
    while 2 * sequences * seq_len <= TOKENS_PER_STEP:
        sequences *= 2
    return sequences


def describe_batch(context: CommandContext) -> str:
    """Return the global batch, and whether it is the default one, in one line."""
    config = context.config()
    training = config.section(TrainingSection)
    sequences, length = training.global_batch_size, training.seq_len
    chosen = "" if GLOBAL_BATCH in config.overridden else f", by default; --{GLOBAL_BATCH} N sets another one"
    return f"global batch: {sequences:,} sequences of {length:,} tokens, {sequences * length:,} tokens a step{chosen}"


def to_fill_in(context: CommandContext) -> str:
    """Return what the user of the written recipe must decide before it trains, in a few lines."""
    lines = [
        f"Trains {context.arguments.model} from random weights. Set before `titan train`:",
        "training.dataset (stdlib stands in)",
    ]
    if context.config().section(ModelSection).tokenizer == "byte":
        lines.append("model.tokenizer and model.tokenizer_path (byte stands in; `titan tokenizer download` prints them)")
    return "\n".join(lines)
