"""Every key that TorchTitan had at last is imported, or listed with the reason; older names are refused."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
import tomli

from harness.old_recipes import RECIPE, imported, nested
from titan_core.api import UserError
from titan_torchtitan.importing import import_recipe
from titan_torchtitan.reading import read
from titan_torchtitan.rules import RULES, last_name, with_defaults
from titan_torchtitan.values import DECIDE
from titan_torchtitan.writing import to_toml

SAMPLES: dict[str, list[Any]] = {
    "bool": [False, True], "int": [0, 4], "float": [0.0, 0.25], "str": ["", "other"], "list": [[], ["output"]],
    "ranks": [[0, 1]], "any": [[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]],
}  # fmt: skip


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in RULES}))
def test_every_key_is_mapped_or_listed_with_the_reason(section: str) -> None:
    for key in (key for key in RULES if key.startswith(f"{section}.")):
        for value in ["llama3"] if key == "model.name" else SAMPLES[RULES[key].type]:
            outcome = imported({key: value})
            (entry,) = (entry for entry in outcome.entries if entry.old == key)
            assert entry.value == value and entry.status != "unknown"
            assert entry.new or entry.why, entry
            assert tomli.loads(to_toml(outcome)) == nested(outcome.values)
            assert entry.new or f"# {key} = " in to_toml(outcome)


def test_the_rules_are_consistent() -> None:
    assert {key for key, rule in RULES.items() if rule.by} == DECIDE.keys()
    assert all(bool(rule.by) + bool(rule.ignore) + bool(rule.refuse) <= 1 for rule in RULES.values())
    assert all(rule.when.partition("=")[0] in RULES or not rule.when for rule in RULES.values())
    everything_on = {key: ["quantize.linear.float8", "quantize.linear.mx"] for key in ("model.converters",)} | {
        key: True for key, rule in RULES.items() if rule.type == "bool"
    }
    assert len(with_defaults({})) == 9
    assert with_defaults(everything_on | {"parallelism.pipeline_parallel_layers_per_stage": 2}).keys() <= RULES.keys()


def test_a_whole_recipe_needs_no_attention() -> None:
    old = read(str(RECIPE))
    assert not import_recipe(old, ["llama3"]).needs_attention
    rare = RULES.keys() - old.given.keys()
    assert len(rare) < 25, sorted(rare)


@pytest.mark.parametrize(
    ("old", "last"),
    [
        ("training.batch_size", "training.local_batch_size"),
        ("training.seed", "debug.seed"),
        ("training.tensor_parallel_degree", "parallelism.tensor_parallel_degree"),
        ("experimental.pipeline_parallel_degree", "parallelism.pipeline_parallel_degree"),
        ("float8.filter_fqns", "quantize.linear.float8.filter_fqns"),
        ("quantize.dense.mx.recipe_name", "quantize.linear.mx.recipe_name"),
        ("quantize.moe.float8.fqns", "quantize.grouped_mm.float8.fqns"),
        ("checkpoint.interval_type", ""),
        ("training.local_batch_size", None),
        ("training.mine", None),
    ],
)
def test_names_of_older_recipes_are_known(old: str, last: str | None) -> None:
    assert last_name(old) == last
    if last is not None:
        with pytest.raises(UserError, match=rf"{old} \({f'now {last}' if last else 'removed'}\); .*docs/torchtitan.md"):
            imported({"training.steps": 3, old: 1})


@pytest.mark.parametrize(
    "value",
    [True, 0, -1, 10**30, 1.5, math.nan, "", "x", "x,y", [], [1], [[]], [{"a": 1}], datetime.date(2024, 5, 1)],
    ids=repr,
)
def test_no_value_is_a_surprise(value: Any) -> None:
    """Every key with every kind of value is imported, or refused in one line."""
    base = {"training.local_batch_size": 0, "validation.enable": True, "parallelism.pipeline_parallel_degree": 2}
    for key in RULES:
        refusal = ""
        try:
            outcome = imported({**base, key: value})
        except UserError as error:
            refusal = str(error)
        if refusal:
            assert f"{key} = " in refusal
            continue
        assert [entry for entry in outcome.entries if entry.old == key]
        tomli.loads(to_toml(outcome))
