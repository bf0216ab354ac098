"""YAML that every parser reads alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Booleans of YAML 1.1. Go's parsers, which read Kubernetes' files, know more of them than PyYAML."""
_BREAKS = re.compile("[\x85\u2028\u2029\ufeff]")
"""Ends a line in YAML 1.1 only, or is dropped. PyYAML writes it raw into a block, where parsers differ in what follows."""


class _Text(str):
    """A value, as opposed to a key."""

    __slots__ = ()


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return ``documents`` as YAML. Text is quoted unless it is a plain word, and stands in blocks if it has several lines.

    Args:
        documents: of plain values.
    """
    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(_Text, _represent)
    plain = [_marked(document) for document in documents]
    text: str = yaml.dump_all(plain, Dumper=dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return text


def _marked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item) for item in value]
    return _Text(value) if isinstance(value, str) else value


def _represent(dumper: Any, text: _Text) -> Any:
    # PyYAML quotes text with other control characters, which no block can hold.
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    block = text.endswith("\n") and text.strip() != "" and _BREAKS.search(text) is None
    style = None if plain else "|" if block else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style=style)
