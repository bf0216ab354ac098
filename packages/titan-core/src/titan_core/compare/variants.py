"""Variants of a recipe: what ``--vary`` and ``--variant`` mean."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_core.config.overrides import Override, parse_overrides
from titan_core.errors import UserError

BASELINE = "as it is"


@dataclass(frozen=True)
class Variant:
    """A recipe with some keys changed."""

    name: str
    overrides: tuple[Override, ...]

    @property
    def folder(self) -> str:
        """A name for its directory."""
        return "".join(letter if letter.isalnum() or letter in "=.,_-" else "_" for letter in self.name.replace(", ", ","))


def variants_of(vary: Sequence[str], variant: Sequence[str]) -> list[Variant]:
    """Every combination of the values of each ``vary``; or the recipe as it is, and each ``variant``.

    Args:
        vary: ``"section.key=A,B,..."`` each.
        variant: ``"section.key=A section.other=B"`` each.

    Raises:
        UserError: one is not written so, or there is nothing to compare.
    """
    if not vary and not variant:
        way_out = "give --vary SECTION.KEY=A,B, or --variant 'SECTION.KEY=A SECTION.OTHER=B'"
        raise UserError.one("titan compare", "nothing varies", way_out)
    choices = [_choices(text) for text in vary]
    found = [_named(combination) for combination in itertools.product(*choices)] if vary else [Variant(BASELINE, ())]
    for text in variant:
        overrides = parse_overrides([f"--{part}" for part in split(text, " ")])
        found.append(_named(tuple(overrides)))
    names = [one.name for one in found]
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


def _named(overrides: tuple[Override, ...]) -> Variant:
    """The last word of a key says enough, unless two share it."""
    last = [override.key.rpartition(".")[2] for override in overrides]
    shown = [
        override.key if last.count(word) > 1 or word == "enable" else word
        for override, word in zip(overrides, last, strict=True)
    ]
    return Variant(", ".join(f"{key}={one.text}" for key, one in zip(shown, overrides, strict=True)), overrides)


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
    """By round, the directory of each variant's run."""
    return [
        [output / f"round-{number}" / one.folder if rounds > 1 else output / one.folder for one in variants]
        for number in range(1, rounds + 1)
    ]
