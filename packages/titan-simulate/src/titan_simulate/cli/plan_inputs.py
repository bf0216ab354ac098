"""Inputs of ``titan plan``: devices, their prices and numbers, and the length of the run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from shlex import quote
from typing import Final

from titan_core.api import CommandContext, UserError
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.api.config.sections import TrainingSection
from titan_core.toolkit.arguments import number, rank_count
from titan_core.toolkit.text import shorten
from titan_simulate.estimate.job_memory import holders, least_state
from titan_simulate.hardware.machine import Machine
from titan_simulate.hardware.read import names, read_machine
from titan_simulate.plan.kinds import GLOBAL_BATCH

_TOKENS: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)(?:[eE]\+?(\d{1,2}))?([kKmMbBtT]?)", re.ASCII)
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_TOKENS: Final = 10**18
_DEAREST: Final = 1e6


@dataclass(frozen=True)
class Device:
    """A machine to plan for."""

    name: str
    """Its name, or file, on the command line."""
    machine: Machine
    """Without the memory that stays free."""
    price: float | None
    """Of a device for an hour."""


def scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say on what, and for how long, the job runs."""
    gpus = parser.add_mutually_exclusive_group(required=True)
    gpus.add_argument("--gpus", type=rank_count, metavar="N", help="number of devices, one rank each")
    gpus.add_argument(
        "--max-gpus", type=rank_count, metavar="M",
        help="plan all powers of two up to M, and print a table",
    )  # fmt: skip
    parser.add_argument(
        "--device", action="append", metavar="NAME|FILE",
        help=f"the machine: {', '.join(names())}, or a TOML file (default: h100). Several, with commas between: a table",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=token_count, metavar="T",
        help="tokens of the whole run, such as 300B, 2T or 1e12: sets training.steps, and adds days and GPU-hours",
    )  # fmt: skip
    parser.add_argument(
        "--budget-hours", type=number("a number of GPU-hours", 0.01, 1e12), metavar="H",
        help="GPU-hours that the run of --tokens may take: mark what does",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=prices, metavar="P|NAME=P,...",
        help="price of a device for an hour: one, or by name (h100=2.5,b200=4)",
    )  # fmt: skip


def token_count(text: str) -> int:
    """Return a number of tokens: ``"2T"``, ``"1.5B"``, ``"1e12"``."""
    found = _TOKENS.fullmatch(text)
    value = Fraction(0)
    if found is not None:
        mantissa, power, unit = found.groups()
        value = Fraction(mantissa) * 10 ** int(power or 0) * _UNITS[unit.upper()]
    if not 1 <= value <= _MOST_TOKENS or value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a number of tokens, such as 300B, 2T or 1e12")
    return int(value)


def prices(text: str) -> Mapping[str, float]:
    """Return device -> price; one without a name is that of ``""``."""
    price = number("a price", 0.01, _DEAREST)
    pairs = [part.rpartition("=") for part in text.split(",")]
    if len(pairs) > 1 and not all(name for name, _, _ in pairs):
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is neither one price nor NAME=P,NAME=P")
    return {name: price(value) for name, _, value in pairs}


def read_devices(options: argparse.Namespace) -> list[Device]:
    """Return the devices of the command line, each once.

    Raises:
        UserError: there is no such machine, or a price is that of another one.
    """
    given = dict.fromkeys(name for text in options.device or ["h100"] for name in text.split(","))
    named: Mapping[str, float] = options.price or {}
    if unknown := [name for name in named if name and name not in given]:
        why, fix = "no such device is planned", f"name one of {', '.join(given)}, or add it to --device"
        raise UserError.one(f"--price {shorten(unknown[0])}={named[unknown[0]]:g}", why, fix)
    devices = []
    for name in given:
        whole = read_machine(name)
        machine = whole.model_copy(update={"memory_gib": whole.memory_gib * (1.0 - options.headroom)})
        devices.append(Device(name, machine, named.get("", named.get(name))))
    return devices


def check_inputs(options: argparse.Namespace, devices: Sequence[Device], recipes: Sequence[str]) -> None:
    """
    Args:
        recipes: names of the installed ones.

    Raises:
        UserError: arguments contradict each other, or miss one.
    """
    if options.model is not None and options.recipe is not None:
        raise UserError.one(f"--model {shorten(options.model)}", f"replaces the recipe {options.recipe}", "give one of them")
    if options.model is not None and options.model in recipes:
        raise UserError.one(
            f"--model {options.model}", "is a recipe", f"write `titan plan {quote(options.model)}` without --model"
        )
    if options.model is not None and options.seq_len is None:
        raise UserError.one(f"--model {shorten(options.model)}", "needs the length of sequences", "add --seq-len L")
    if options.model is None and options.seq_len is not None:
        fix = f"write --training.seq_len {options.seq_len}"
        raise UserError.one(f"--seq-len {options.seq_len}", "belongs to --model; a recipe has its own", fix)
    for option, value in (("--budget-hours", options.budget_hours), ("--price", options.price)):
        if value is not None and options.tokens is None:
            raise UserError.one(option, "needs the length of the run", "add --tokens T")
    if options.out is not None and (options.gpus is None or len(devices) > 1):
        why = "holds one recipe, and a table plans several"
        raise UserError.one(
            f"--out {shorten(options.out)}", why, "plan one device and one number of GPUs (--gpus) to write it"
        )


def check_job(context: CommandContext) -> float:
    """Check what the command line says about the length and the batch of the job. May import torch.

    Returns:
        GiB of all devices together without which the job cannot fit.

    Raises:
        UserError: the recipe has a mistake that has nothing to do with the number of devices, or they are wrong for it.
    """
    options, config = context.arguments, context.config()
    training = config.section(TrainingSection)
    if options.tokens is not None and config.stages:
        fix = "leave it out; `titan estimate` adds up the stages of the planned recipe"
        raise UserError.one("--tokens", "the recipe has [[stages]], which say when each of them ends", fix)
    if options.gpus is None and training.global_batch_size < 0:
        why = "each number of GPUs would train with a global batch of its own"
        raise UserError.one(config.where(GLOBAL_BATCH, training.global_batch_size), why, f"set --{GLOBAL_BATCH} N")
    sequences = training.global_batch_size
    try:
        job = context.job(options.gpus, missing_ok=True)
        sequences = job.batch.global_size
    except UserError:  # of the recipe's degrees on this many devices, unless it is raised again
        job = context.job(None, missing_ok=True)
    if options.tokens is not None and sequences > 0:
        _check_tokens(options.tokens, sequences * job.batch.seq_len)
    offloads = config.stages or training.enable_cpu_offload
    return 0.0 if offloads else least_state(job).state * holders(job) / 2**30


def _check_tokens(tokens: int, tokens_per_step: int) -> None:
    """
    Raises:
        UserError: a run of ``tokens`` tokens has no whole step, or too many.
    """
    few = tokens < tokens_per_step
    if few or tokens > MOST_STEPS * tokens_per_step:
        why = f"is {'less than one step' if few else f'more than {MOST_STEPS:,} steps'}, of {tokens_per_step:,} tokens each"
        fix = f"write it as 300B, 2T or 1e12, or change {GLOBAL_BATCH}"
        raise UserError.one(f"--tokens {tokens:,}", why, fix)
