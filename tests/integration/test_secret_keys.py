"""None of Titan's own keys looks like the key of a secret, whose value would be left out of files and messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from titan_completion.schema import json_schema
from titan_core.api import Model
from titan_core.api.config.secrets import is_secret
from titan_core.plugins.discovery import discover
from titan_core.plugins.registry import Components


def names_in(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        yield from schema.get("properties", {})
        for one in schema.values():
            yield from names_in(one)
    elif isinstance(schema, list):
        for one in schema:
            yield from names_in(one)


def test_no_key_of_titan_is_mistaken_for_a_secret() -> None:
    registry = Components(discover())
    names = set(names_in(json_schema(registry)))
    for model in registry.all(Model):
        names.update(*(vars(flavor) for flavor in model.flavors.values()))
    assert {"tokenizer_path", "save_traces_folder", "lr", "training"} <= names
    assert [name for name in sorted(names) if is_secret(name)] == ["webhook_url"]  # whoever has it may post
