"""Variants of a recipe: what ``--vary`` and ``--variant`` mean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_core.api.config import Override
from titan_core.api.errors import UserError
from titan_core.api.tools.arguments import parse_overrides

BASELINE = "as it is"
LONGEST = 80
"""Letters of a directory's name."""


@dataclass(frozen=True)
class Variant:
    """A recipe with some keys changed."""

    name: str
    overrides: tuple[Override, ...]


def variants_of(vary: Sequence[str], variant: Sequence[str]) -> list[Variant]:
    """Every combination of the values of each ``vary``; or the recipe as it is, and each ``variant``.

    Args:
        vary: ``"section.key=A,B,..."`` each.
        variant: ``"section.key=A section.other=B"`` each.

    Raises:
        UserError: one is not written so, or there is nothing to compare.
    """
    if not vary and not variant:
        fix = "give --vary SECTION.KEY=A,B, or --variant 'SECTION.KEY=A SECTION.OTHER=B'"
        raise UserError.one("titan compare", "nothing varies", fix)
    changes = list(itertools.product(*(_choices(text) for text in vary))) if vary else [()]
    changes += [tuple(parse_overrides([f"--{part}" for part in split(text, " ")])) for text in variant]
    if not vary and not all(changes[1:]):
        raise UserError.one("--variant ''", "it changes nothing", "drop it: the recipe as it is is compared anyway")
    names = [_short(overrides) for overrides in changes]
    if len(set(names)) < len(names) or any(len({one.key.rpartition(".")[2] for one in of}) < len(of) for of in changes):
        names = [_name(overrides, [one.key for one in overrides]) for overrides in changes]  # short ones would mislead
    found = [Variant(name or BASELINE, overrides) for name, overrides in zip(names, changes, strict=True)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError.one("titan compare", f"the variant {twice!r} is there twice", "drop one")
    if len(found) < 2:
        raise UserError.one(f"--vary {vary[0]}", "there is one variant alone", "give at least two values: SECTION.KEY=A,B")
    return found


def _choices(text: str) -> list[Override]:
    key, equals, values = text.partition("=")
    if not equals or "." not in key:
        raise UserError.one(f"--vary {text}", "not a key with its values", "write --vary SECTION.KEY=A,B")
    found = [Override(key.strip().removeprefix("--"), value) for value in split(values, ",")]
    if not found:
        raise UserError.one(f"--vary {text}", "no values are given", "write --vary SECTION.KEY=A,B")
    return found


def _short(overrides: Sequence[Override]) -> str:
    """By the last words of the keys; "enable" alone says nothing."""
    words = [one.key.rpartition(".")[2] for one in overrides]
    return _name(overrides, [one.key if word == "enable" else word for one, word in zip(overrides, words, strict=True)])


def _name(overrides: Sequence[Override], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={one.text}" for key, one in zip(keys, overrides, strict=True))


def split(text: str, separator: str) -> list[str]:
    """``text`` parted at ``separator`` wherever it is not inside of brackets or quotes; without empty parts."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == separator and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def folders_of(variants: Sequence[Variant], output: Path, rounds: int) -> list[list[Path]]:
    """By round, the directory of each variant's run: named for the variant, as far as a file's name can be."""
    names: list[str] = []
    for variant in variants:
        plain = re.sub(r"[^\w=.,-]", "_", variant.name.replace(", ", ","))[:LONGEST]
        taken = names.count(plain)
        names.append(f"{plain}-{len(names) + 1}" if taken else plain)
    return [
        [(output / f"round-{number}" if rounds > 1 else output) / name for name in names] for number in range(1, rounds + 1)
    ]
