"""The new recipe as commented TOML, and the table of what became of each key."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, get_args

import tomli_w

from titan_core.toolkit.secrets import redact
from titan_core.toolkit.text import show
from titan_torchtitan.outcome import Entry, ImportOutcome, Status

_SECTIONS: Final = (
    "job", "model", "model.args", "model.args.rope_scaling", "training", "data", "validation", "optimizer", "lr_scheduler",
    "parallelism", "activation_checkpoint", "compile", "float8", "mx", "checkpoint", "metrics", "profiling", "comm",
)  # fmt: skip
"""The order of sections in a recipe."""
_NOT_IMPORTED: Final[tuple[tuple[Status, str], ...]] = (
    ("unknown", "Unknown keys, which TorchTitan itself never had"),
    ("unsupported", "Keys that Titan has no equivalent of: what they request does not happen"),
    ("ignored", "Keys that nothing depends on"),
)


_COLUMN: Final = 55
"""Characters of a key and its value in the table, as far as the key allows."""


def to_toml(outcome: ImportOutcome) -> str:
    """Return the new recipe. A comment names the earlier key or the reason, and the keys that could not be imported are
    comments at its end."""
    title = f"{PurePath(outcome.old.source).name}, a TorchTitan recipe, imported by `titan config import`"
    lines = [f"# {_printable(title)}"]
    comments = _comments(outcome.entries)
    tables = _tables(outcome.values)
    for section in sorted(tables, key=_SECTIONS.index):
        lines += ["", f"[{section}]"]
        for key, value in tables[section].items():
            comment = comments.get(f"{section}.{key}", "")
            lines.append(f"{key} = {_toml(value)}{f'  # {_printable(comment)}' if comment else ''}")
    for status, title in _NOT_IMPORTED:
        entries = [entry for entry in outcome.entries if entry.status == status and not entry.new]
        if entries:
            lines += ["", f"# {title}:"]
            whys = [f"  # {entry.why}" if status != "unknown" else "" for entry in entries]
            lines += [_printable(f"# {_commented(entry)}{why}") for entry, why in zip(entries, whys, strict=True)]
    return "\n".join(lines) + "\n"


def _tables(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        tables.setdefault(section, {})[name] = value
    return tables


def _comments(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the comment of each key that did not stay the same. One that several keys come from is at the first."""
    comments: dict[str, str] = {}
    for entry in entries:
        if entry.status not in ("changed", "default", "unsupported") or not entry.new:
            continue
        key = next(iter(entry.new))
        shown = entry.why if entry.old == key and entry.value == entry.new[key] else _because(entry)
        comments[key] = "; ".join(filter(None, (comments.get(key), shown)))
    return comments


def _because(entry: Entry) -> str:
    """Return the comment of a key that has another name or value than in the old recipe."""
    if not entry.old:
        return entry.why
    same = list(entry.new.values()) == [entry.value]
    was = f"was {entry.old}" if same else f"was {entry.old} = {show(entry.value, entry.old)}"
    return ": ".join(filter(None, (was, entry.why)))


def _toml(value: Any) -> str:
    """Return a value in TOML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    return tomli_w.dumps({"key": value}).removeprefix("key = ").strip()


def _printable(text: str) -> str:
    """Return ``text`` without line breaks and other characters that a comment of TOML must not contain."""
    return "".join(character if character.isprintable() else " " for character in text)


def _commented(entry: Entry) -> str:
    """Return the key and its whole value as the old recipe has them, without secrets."""
    return f"{entry.old} = {_toml(redact({entry.old: entry.value})[entry.old])}"


def _plain(entry: Entry) -> Any:
    """Return the value for JSON, without secrets; dates as text."""
    return json.loads(json.dumps(redact({entry.old: entry.value})[entry.old], default=str))


def rows(outcome: ImportOutcome) -> Iterator[tuple[str, str, str]]:
    """Yield (status, key, note) of every key that did not stay the same, in the order of importance."""
    for status in get_args(Status):
        for entry in outcome.entries:
            if entry.status == status != "same":
                yield status, _printable(_shown(entry)), _printable(_note(entry))


def _shown(entry: Entry) -> str:
    """Return the key and the beginning of its value: the new recipe contains the whole value."""
    if not entry.old:
        return "(not set)"
    value = show(entry.value, entry.old)
    room = max(20, _COLUMN - len(entry.old))
    return f"{entry.old} = {value if len(value) <= room else f'{value[: room - 4]} ...'}"


def _note(entry: Entry) -> str:
    new = ", ".join(f"{key} = {show(value, key)}" for key, value in entry.new.items())
    return ": ".join(filter(None, (new, entry.why)))


def summary(outcome: ImportOutcome) -> str:
    """Return one line with the number of keys by what became of them."""
    words: dict[Status, str] = {
        "same": "unchanged", "changed": "renamed or changed", "default": "added, because a default differs",
        "ignored": "without effect", "unsupported": "not supported", "unknown": "unknown",
    }  # fmt: skip
    counts = Counter(entry.status for entry in outcome.entries)
    return ", ".join(f"{counts[status]} {word}" for status, word in words.items() if counts[status])


def as_json(outcome: ImportOutcome, recipe: str) -> dict[str, Any]:
    """Return the outcome as plain values."""
    return {
        "source": outcome.old.source,
        "complete": not outcome.needs_attention,
        "recipe": recipe,
        "keys": [
            {
                "status": entry.status, "old": entry.old or None, "value": _plain(entry),
                "new": dict(entry.new), "why": entry.why,
            }
            for entry in outcome.entries
        ],
    }  # fmt: skip
