"""Every key that TorchTitan had is imported, or listed with the reason."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import tomli

from harness.old_recipes import RECIPES, imported, nested
from titan_core.api.errors import UserError
from titan_torchtitan.importing import import_recipe
from titan_torchtitan.keys import ALIASES, KEYS, TITAN_ONLY, Kind
from titan_torchtitan.reading import read
from titan_torchtitan.writing import to_toml

SAMPLES: dict[Kind, list[Any]] = {
    "bool": [False, True], "int": [0, 4], "float": [0.0, 0.25], "str": ["", "other"], "list": [[], ["output"]],
    "ranks": [[0, 1]],
    "any": [[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]],
}  # fmt: skip
REQUIRED = {"model.name": ["llama3"]}
"""Values of keys that no import can do without."""


SECTIONS = sorted({name.partition(".")[0] for name in (*KEYS, *ALIASES)})


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_torchtitan_is_mapped_or_listed_with_the_reason(section: str) -> None:
    for name in (name for name in (*KEYS, *ALIASES) if name.startswith(f"{section}.")):
        alias = ALIASES.get(name)
        kind = (alias.kind if alias else None) or KEYS[alias.key if alias else name].kind
        for value in REQUIRED.get(name, SAMPLES[kind]):
            outcome = imported({name: value})
            (entry,) = (entry for entry in outcome.entries if entry.old == name)
            assert entry.value == value
            assert entry.status != "unknown"
            assert entry.new or entry.why, entry
            assert tomli.loads(to_toml(outcome)) == nested(outcome.values)
            assert entry.new or f"# {name} = " in to_toml(outcome)


def test_the_catalogue_is_consistent() -> None:
    assert not KEYS.keys() & ALIASES.keys()
    assert not TITAN_ONLY & (KEYS.keys() | ALIASES.keys())
    assert {alias.key for alias in ALIASES.values()} <= KEYS.keys()
    assert all(alias.since <= alias.until for alias in ALIASES.values())


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_whole_recipe_needs_no_attention(recipe: Path) -> None:
    outcome = import_recipe(read(str(recipe)), ["llama3"])
    assert not outcome.needs_attention
    assert str(outcome.old.generation) == recipe.stem.replace("_", " ").replace("first", "the first").replace(
        "end", "the end"
    )


def test_the_recipes_cover_the_catalogue() -> None:
    """Each name is in a recipe of the tests, but those that few recipes ever had."""
    seen: set[str] = set()
    for recipe in RECIPES.glob("*.toml"):
        seen |= read(str(recipe)).names()
    rare = {name for name in (*KEYS, *ALIASES) if name not in seen}
    assert len(rare) < 70, sorted(rare)


@pytest.mark.parametrize(
    "value",
    [True, 0, -1, 10**30, 1.5, math.nan, "", "x", "x,y", [], [1], [[]], [{"a": 1}], datetime.date(2024, 5, 1)],
    ids=repr,
)
def test_no_value_is_a_surprise(value: Any) -> None:
    """Every key with every kind of value is imported, or refused in one line."""
    base = {"training.local_batch_size": 0, "validation.enable": True, "parallelism.pipeline_parallel_degree": 2}
    for name in (*KEYS, *ALIASES):
        refusal = ""
        try:
            outcome = imported({**base, name: value})
        except UserError as error:
            refusal = str(error)
        if refusal:
            assert f"{name} = " in refusal
            continue
        assert [entry for entry in outcome.entries if entry.old == name]
        tomli.loads(to_toml(outcome))
