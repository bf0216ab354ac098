"""Finding secrets in what would become a part of a rendered file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from titan_core.api import Problem
from titan_core.api.config.resolved import COMMAND_LINE, Override
from titan_core.api.config.secrets import is_secret, redact, redact_arguments, redact_text
from titan_core.api.config.toml import parse_toml
from titan_core.toolkit.text import shorten

_WHY = "is a secret, which a rendered file must not contain"
_INSIDE = "contains a secret, which a rendered file must not"
_FIX = "set it in the environment of the job (such as HF_TOKEN or WANDB_API_KEY), and leave it out here"
_ASSIGNMENT = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]++)["']?\s*+(?P<sign>[=:])(?P<space>\s*+)""")
_NAMES = frozenset({"secret", "volume"})
"""Options that take names of things on the cluster, such as a Secret ``api-token``. Other checks allow them nothing else."""


def secrets_in_options(given: argparse.Namespace) -> Iterator[Problem]:
    """Yield a problem for each option of the command that contains a secret: ``--sbatch=--export=ALL,HF_TOKEN=...``."""
    for name, value in vars(given).items():
        if name in _NAMES:
            continue
        for text in value if isinstance(value, list) else [value]:
            if _has_secret(str(text), "="):
                option = "the recipe's path" if name == "recipe" else f"--{name.replace('_', '-')}"
                yield Problem(f"{COMMAND_LINE}: {option}", _INSIDE, _FIX)


def secrets_in_overrides(overrides: Iterable[Override]) -> Iterator[Problem]:
    """Yield a problem for each override that is a secret, or whose text contains one."""
    for override in overrides:
        argument = f"--{override.key}={override.text}"
        if redact_arguments([argument]) != [argument] or _has_secret(override.text, "="):
            yield Problem(f"{COMMAND_LINE}: --{override.key}", _WHY, _FIX)


def secrets_in_recipe(recipe: str, text: str) -> Iterator[Problem]:
    """Yield a problem for each secret in the text of a recipe: in its values, or else in the lines, of which comments are
    a part of the rendered file too."""
    tables = parse_toml(text)
    found = list(_changed(tables, redact(tables)))
    yield from (Problem(f"{shorten(recipe)}: {key}", _WHY, _FIX) for key in found)
    if not found:
        for number, line in enumerate(text.splitlines(), 1):
            if _has_secret(line, "=:"):
                yield Problem(f"{shorten(recipe)}:{number}", _INSIDE, f"{_FIX}, also out of comments")


def _has_secret(line: str, signs: str) -> bool:
    """Whether ``line`` has a URL or header with a secret, or gives a secret's name a value, as ``api_key = "x"`` does.

    Args:
        signs: characters that stand between name and value.
    """
    if redact_text(line) != line:
        return True
    return any(
        found["sign"] in signs
        and is_secret(found["name"].strip("-"))
        and _is_value(found["space"], line[found.end() : found.end() + 1000])
        for found in _ASSIGNMENT.finditer(line)
    )


def _is_value(space: str, text: str) -> bool:
    """Whether ``text`` begins with a value, and not with prose (``token: one for each word``) or a placeholder."""
    inner = text.lstrip("[{(\\ ")
    quoted = re.match(r"(\"{3}|'{3}|[\"'])(.*?)(?:\1|$)", inner)
    if quoted:
        value = quoted[2]
    elif inner != text:
        value = inner  # a table or an array
    else:
        value, _, rest = inner.partition(" ")
        if space and rest.strip() and not rest.lstrip().startswith("#"):
            return False
    value = value.strip(" ,;)]}\\'\"")
    placeholder = value.startswith(("$", "<")) or not re.search(r"[^\W_xX]", value)
    return not placeholder and value.lower() not in ("true", "false", "none", "null")


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values differ."""
    for key, value in before.items():
        if isinstance(value, dict) and isinstance(after[key], dict):
            yield from _changed(value, after[key], f"{prefix}{key}.")
        elif value != after[key]:
            yield f"{prefix}{key}"
