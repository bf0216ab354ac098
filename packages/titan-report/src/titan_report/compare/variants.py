"""Variants of a recipe, as ``--vary`` and ``--variant`` define them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_core.toolkit.arguments import parse_overrides

BASELINE = "baseline"
LONGEST = 80
"""Longest directory name, in characters."""


@dataclass(frozen=True)
class Variant:
    """A recipe with some keys changed."""

    name: str
    overrides: tuple[Override, ...]


def variants_of(vary: Sequence[str], variant: Sequence[str]) -> list[Variant]:
    """Return every combination of the values of ``vary`` (without ``vary``, the unchanged recipe), then each ``variant``.

    Args:
        vary: entries of the form ``"section.key=A,B,..."``.
        variant: entries of the form ``"section.key=A section.other=B"``.

    Raises:
        UserError: an entry is malformed, or there is nothing to compare.
    """
    if not vary and not variant:
        fix = "add --vary SECTION.KEY=A,B, or --variant 'SECTION.KEY=A SECTION.OTHER=B'"
        raise UserError.one("titan compare", "there is nothing to compare", fix)
    changes = list(itertools.product(*(_choices(text) for text in vary))) if vary else [()]
    changes += [tuple(parse_overrides([f"--{part}" for part in split(text, " ")])) for text in variant]
    if not vary and not all(changes[1:]):
        raise UserError.one("--variant ''", "changes nothing", "drop it: the unchanged recipe is always compared")
    names = [_short(overrides) for overrides in changes]
    if len(set(names)) < len(names) or any(map(_repeats_a_word, changes)):  # short names would be ambiguous
        names = [_name(overrides, [override.key for override in overrides]) for overrides in changes]
    found = [Variant(name or BASELINE, overrides) for name, overrides in zip(names, changes, strict=True)]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UserError.one("titan compare", f"the variant {duplicate!r} appears twice", "drop one")
    if len(found) < 2:
        raise UserError.one(f"--vary {vary[0]}", "defines only one variant", "list at least two values: SECTION.KEY=A,B")
    return found


def _repeats_a_word(overrides: Sequence[Override]) -> bool:
    """Whether the last words of two keys are the same."""
    return len({override.key.rpartition(".")[2] for override in overrides}) < len(overrides)


def _choices(text: str) -> list[Override]:
    key, equals, values = text.partition("=")
    if not equals or "." not in key:
        raise UserError.one(f"--vary {text}", "not a key with its values", "write --vary SECTION.KEY=A,B")
    found = [Override(key.strip().removeprefix("--"), value) for value in split(values, ",")]
    if not found:
        raise UserError.one(f"--vary {text}", "has no values", "write --vary SECTION.KEY=A,B")
    return found


def _short(overrides: Sequence[Override]) -> str:
    """Return a name with only the last word of each key. "enable" would be meaningless, so its key stays whole."""
    words = [override.key.rpartition(".")[2] for override in overrides]
    pairs = zip(overrides, words, strict=True)
    return _name(overrides, [override.key if word == "enable" else word for override, word in pairs])


def _name(overrides: Sequence[Override], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={override.text}" for key, override in zip(keys, overrides, strict=True))


def split(text: str, separator: str) -> list[str]:
    """Split ``text`` at each ``separator`` outside brackets and quotes; drop empty parts."""
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
    """Return the run directory of each variant, by round. Its name is that of the variant, made safe for file systems."""
    names: list[str] = []
    for variant in variants:
        plain = re.sub(r"[^\w=.,-]", "_", variant.name.replace(", ", ","))[:LONGEST]
        taken = names.count(plain)
        names.append(f"{plain}-{len(names) + 1}" if taken else plain)
    return [
        [(output / f"round-{number}" if rounds > 1 else output) / name for name in names] for number in range(1, rounds + 1)
    ]
