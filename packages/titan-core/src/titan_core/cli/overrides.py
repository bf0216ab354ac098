"""Config overrides on a command line: ``--section.key VALUE``; for booleans, ``--section.key`` and ``--no-section.key``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from titan_core.api import Problem
from titan_core.api._shown import shorten
from titan_core.api.config.resolved import COMMAND_LINE
from titan_core.plugins.registry import Components
from titan_core.toolkit.errors import MOST_SUGGESTED, close_names, nearest
from titan_core.toolkit.fields import MODEL_ARGS, accepts_boolean, field_at, field_docs, model_families, type_name

_HELP = ("-h", "--help")
_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")
"""Words that are the value of a boolean key before them. Validation accepts only ``true`` and ``false``."""
_MOST_DETAIL = 6
"""Length of the longest documentation that is "little more" than a word, relative to the word."""


@dataclass
class SplitArguments:
    """The arguments of a command, divided into its own and the overrides."""

    own: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    """``--section.key=VALUE``, or ``--section.key`` and ``VALUE``."""
    problems: list[Problem] = field(default_factory=list)


def split_overrides(arguments: Sequence[str], registry: Components) -> SplitArguments:
    """Separate overrides from a command's own arguments, because argparse would take their values as positionals.

    The word after a boolean key is its value only if it reads like a boolean. ``--compile.enable my.toml`` therefore
    means true, and ``my.toml`` is an argument of the command.
    """
    found = SplitArguments()
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        flag, equals, _ = argument.partition("=")
        if not (flag.startswith("--") and "." in flag):
            found.own.append(argument)
            continue
        following = waiting[-1] if waiting and not equals else None
        key = flag[2:].replace("-", "_")
        known = field_at(registry, key)
        negated = key.removeprefix("no_") if known is None and key.startswith("no_") else None
        if negated is not None:
            has_value = _is_boolean(following)
            if _negate(found, flag, negated, equals or has_value, registry):
                if has_value:
                    waiting.pop()
                continue
        elif accepts_boolean(known) and not equals and not _is_boolean(following):
            found.overrides.append(f"{flag}=true")
            continue
        found.overrides.append(argument)
        if equals:
            continue
        if following is not None and not following.startswith("--") and following not in _HELP:
            found.overrides.append(waiting.pop())
        elif known is None:
            found.overrides[-1] += "="  # the config reports the unknown key
        else:
            found.overrides.pop()
            expected = type_name(known.annotation)
            found.problems.append(
                Problem(f"{COMMAND_LINE}: {flag}", "needs a value", f"write {flag} VALUE, where VALUE is {expected}")
            )
    return found


def _is_boolean(word: str | None) -> bool:
    return word is not None and word.lower() in _BOOLEANS


def _negate(found: SplitArguments, flag: str, key: str, has_value: object, registry: Components) -> bool:
    """Add the override of ``--no-section.key``, or the reason why it is none. Return whether its section exists."""
    where, positive = f"{COMMAND_LINE}: {flag}", f"--{key}"
    known = field_at(registry, key)
    section, _, name = key.partition(".")
    if known is None:
        if section not in registry.sections():
            return False
        keys = [key for cls in registry.sections()[section] for key in cls.model_fields]
        found.problems.append(Problem(where, "unknown key", nearest(name, keys)))
    elif not accepts_boolean(known):
        why = f"{key} is not a boolean, but {type_name(known.annotation)}"
        found.problems.append(Problem(where, why, f"write {positive} VALUE"))
    elif has_value:
        found.problems.append(Problem(where, "takes no value", f"write {flag} or {positive} alone"))
    else:
        found.overrides.append(f"{positive}=false")
    return True


def unknown_argument(argument: str, following: str | None, options: Sequence[str], registry: Components | None) -> str:
    """Return a fix for an argument that a command does not know; empty without a guess.

    Args:
        following: the argument after it, if any.
        options: the command's own options.
        registry: the config keys that the command accepts as overrides; ``None`` if it takes none.
    """
    flag, _, text = argument.partition("=")
    if not text and following is not None and not following.startswith("-"):
        text = following
    word = flag.lstrip("-").replace("-", "_")
    places = {option.removeprefix("--").replace("-", "_"): [option] for option in options}
    docs: dict[str, str] = {}
    for key, doc in _documented_keys(registry) if registry is not None else ():
        name = key.rpartition(".")[2]
        if f"--{key}" not in docs and not set(places.get(name, ())) & set(options):
            places.setdefault(name, []).append(f"--{key}")
        docs[f"--{key}"] = doc
    found = [key for key in docs if key[2:].replace(".", "_") == word]  # "--training-steps"
    found = found or [place for name in close_names(word, places) for place in places[name]]
    if not found and len(word) > 2:  # "--learning-rate": the key whose documentation is little more than these words
        phrase = re.compile(rf"\b{re.escape(word.replace('_', ' '))}\b", re.IGNORECASE)
        short = (key for key in docs if phrase.search(docs[key]) and len(docs[key]) <= _MOST_DETAIL * len(word))
        found = sorted(short, key=lambda key: len(docs[key]))[:1]
    if not found or len(found) > MOST_SUGGESTED:
        return f"write {word} with its section, as in {found[0]}" if found else ""
    value = f" {shorten(text)}" if text else ""
    return f"did you mean {' or '.join(f'{place}{value}' for place in found)}?"


def _documented_keys(registry: Components) -> Iterator[tuple[str, str]]:
    """Yield every key with its documentation, those of the core first."""
    owners: list[tuple[str, type[BaseModel]]] = [
        (section, cls) for section, classes in registry.sections().items() for cls in classes
    ]
    owners += [(MODEL_ARGS, cls) for cls in model_families(registry).values()]
    for section, cls in owners:
        docs = field_docs(cls)
        yield from ((f"{section}.{key}", docs.get(key, "")) for key in cls.model_fields)
