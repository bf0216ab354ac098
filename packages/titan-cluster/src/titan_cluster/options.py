"""The options that all clusters share, and the checks of names."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from titan_core.api import UserError
from titan_core.api.config.numbers import MOST_PROCESSES, MOST_RANKS
from titan_core.toolkit.arguments import integer, parse_integer, recipe_arguments
from titan_core.toolkit.text import shorten

LONGEST_NAME = 40
"""Most characters of a job's name. Kubernetes allows 63 in the name of a pod, which adds its number and a random suffix."""
END_SECONDS = 5
"""Part of ``--grace`` in which Titan's launcher kills the ranks that are left, and ends, before the cluster kills it."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class Machines:
    """What a job runs on."""

    least: int
    """The fewest machines that it trains on."""
    most: int
    """The machines that it requests."""
    gpus: int
    """GPUs of each machine; 0 for a job on CPUs."""
    ranks: int
    """Ranks of each machine."""

    @property
    def elastic(self) -> bool:
        """Whether the job also trains on fewer machines than it requests."""
        return self.least < self.most


def arguments(parser: argparse.ArgumentParser, *, image: str) -> None:
    """Add the recipe and the options that all clusters share.

    Args:
        image: help of ``--image``.
    """
    recipe_arguments(parser)
    parser.add_argument("--nodes", default="1", metavar="N[:M]", help="machines, or an elastic range (default: 1)")
    parser.add_argument(
        "--gpus-per-node", type=integer(0, MOST_PROCESSES), metavar="G", help="GPUs of each machine, with one rank for each"
    )
    parser.add_argument(
        "--nproc-per-node",
        type=integer(1, MOST_PROCESSES),
        metavar="N",
        help="ranks of each machine, for a job without GPUs (default: one for each GPU)",
    )
    parser.add_argument("--image", metavar="IMAGE", help=image)
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: from the recipe)")
    parser.add_argument(
        "--max-restarts",
        type=integer(0, 1000),
        default=3,
        metavar="N",
        help="restarts of the ranks after a failure, without a new job (default: 3)",
    )


def output_arguments(parser: argparse.ArgumentParser, submit: str) -> None:
    """Add the options that say what becomes of the rendered file.

    Args:
        submit: the command that submits it.
    """
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to FILE (default: standard output)")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--submit", action="store_true", help=f"submit the job with `{submit}`")


def seconds_argument(parser: argparse.ArgumentParser, when: str) -> None:
    """Add ``--grace``.

    Args:
        when: when the time begins.
    """
    parser.add_argument(
        "--grace",
        type=integer(10, 3600),
        default=120,
        metavar="SECONDS",
        help=f"time to finish a step and save a checkpoint {when} (default: 120)",
    )


def retries_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--max-retries``."""
    parser.add_argument(
        "--max-retries",
        type=integer(0, 1000),
        default=3,
        metavar="N",
        help="failures of the job after which the cluster starts it again (default: 3). Preemption is none",
    )


def grace_of_ranks(given: argparse.Namespace) -> int:
    """Return ``--grace`` of Titan's launcher, in seconds: the part of the cluster's that the ranks have."""
    return int(given.grace) - END_SECONDS


def machines(given: argparse.Namespace) -> Machines:
    """Return what the job runs on.

    Raises:
        UserError: ``--nodes`` is neither a number nor a range, or the number of ranks is missing or contradictory.
    """
    first, colon, second = given.nodes.partition(":")
    least = _number(given.nodes, first)
    most = _number(given.nodes, second) if colon else least
    if most < least:
        raise UserError.one(f"--nodes {shorten(given.nodes)}", "the range is empty", "give the smaller number first")
    gpus, ranks = given.gpus_per_node, given.nproc_per_node
    if not gpus and ranks is None:
        where = "--gpus-per-node" if gpus is None else "--gpus-per-node 0"
        why = "is missing" if gpus is None else "leaves the number of ranks open"
        raise UserError.one(where, why, "add --gpus-per-node G, or --nproc-per-node N for a job on CPUs")
    if gpus and ranks not in (None, gpus):
        why = f"contradicts --gpus-per-node {gpus}: each rank has a GPU of its own"
        raise UserError.one(f"--nproc-per-node {ranks}", why, "drop one of them")
    return Machines(least, most, gpus or 0, ranks or gpus)


def _number(nodes: str, text: str) -> int:
    number = parse_integer(text, 1, MOST_RANKS)
    if number is None:
        raise UserError.one(f"--nodes {shorten(nodes)}", "is neither a number nor a range", "use for example 2, or 2:4")
    return number


def job_name(given: str | None, recipe: str) -> str:
    """Return the name of the job: the requested one, or one made from that of the recipe.

    Raises:
        UserError: the requested name is not one that every cluster accepts.
    """
    if given is None:
        return _slug(Path(recipe).stem)
    if len(given) > LONGEST_NAME or _NAME.fullmatch(given) is None:
        why = f"must be at most {LONGEST_NAME} lower-case letters, digits and dashes, and begin with a letter"
        raise UserError.one(f"--name {shorten(given)!r}", why, f"use for example --name {_slug(given)}")
    return given


def _slug(text: str) -> str:
    """Return the nearest valid name."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not slug[:1].isalpha():
        slug = f"titan-{slug}"
    return slug[:LONGEST_NAME].strip("-")


def require_match(option: str, text: str, pattern: str, what: str, example: str) -> str:
    """Return ``text`` if all of it matches ``pattern``.

    Raises:
        UserError: it does not; the error says that ``option`` must be ``what``.
    """
    if re.fullmatch(pattern, text, re.ASCII) is None:
        raise UserError.one(f"{option} {shorten(text)!r}", f"must be {what}", f"use for example {option} {example}")
    return text
