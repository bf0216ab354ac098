"""Stages of a run: ``[[stages]]``, parts of a recipe that replace others from a step on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from titan_core.api import Config, Problem, UserError, matches
from titan_core.api.config.resolved import Stage
from titan_core.api.config.sections import StageEntry
from titan_core.config.problems import problems_of

KEY: Final = "stages"
Table = dict[str, Any]
FIXED: Final = {
    "job.*": "it belongs to the whole run",
    "plugins.*": "the plugins are chosen once for a run",
    "checkpoint.*": "one place and way of saving belongs to the whole run",
    "training.steps": "it is the number of steps of all stages together",
    "training.stop_at_step": "it concerns the whole run",
    "training.seed": "the order of the data follows from it",
    "training.elastic": "it concerns the whole run",
    "data.logical_shards": "the positions in the data belong to logical shards, which must stay the same",
    "data.packing": "a position among packed documents has no counterpart among concatenated ones",
    "data.packing_window": "the positions in the data belong to blocks of this size",
    "data.shuffle": "the positions in the data belong to one order",
    "data.shuffle_buffer": "the positions in the data belong to one order",
    "model.name": "all stages train the same weights",
    "model.flavor": "all stages train the same weights",
    "model.from_pretrained": "all stages train the same weights",
    "model.tokenizer*": "tokens must keep their meaning",
    "optimizer.name": "the optimizer's state belongs to it",
}
"""Keys that a stage cannot set, and why."""


def read_stages(
    entries: Any, tables: Table, config: Config, resolve: Callable[[Table, frozenset[str]], Config]
) -> tuple[Stage, ...]:
    """Return the stages after the first one.

    Args:
        entries: the value of ``stages``.
        tables: the recipe without them, with overrides.
        config: the config of the first stage.
        resolve: returns the config of tables, of whose keys some were set by overrides.

    Raises:
        UserError: an entry is invalid. Lists all problems of the first one that is.
    """
    where = config.where(KEY)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError.one(where, "must be an array of tables", "write [[stages]], and [stages.SECTION] for its keys")
    stages: list[Stage] = []
    names = ["1"]
    for number, entry in enumerate(entries, start=2):
        own = {key: value for key, value in entry.items() if not isinstance(value, dict)}
        changes = {key: value for key, value in entry.items() if isinstance(value, dict)}
        try:
            given = StageEntry.model_validate(own)
        except ValidationError as error:
            prefix = f"{KEY}[{number - 2}]"
            raise UserError(*problems_of(error, prefix, StageEntry, own, config.where)) from None
        name = given.name or str(number)
        where = config.where(f"{KEY}[{number - 2}] ({name})")
        if (given.at_step is None) == (given.at_tokens is None):
            raise UserError.one(where, "needs one of at_step and at_tokens", "set where the stage begins")
        if name in names:
            raise UserError.one(where, "another stage has this name", "give each a different name")
        names.append(name)
        keys = list(_keys(changes))
        problems = [
            Problem(f"{where}: {key}", f"cannot change during a run: {why}", "set it outside of the stages")
            for pattern, why in FIXED.items()
            for key in keys
            if matches(key, (pattern,))
        ]
        if not keys:
            problems = [Problem(where, "changes nothing", "add the keys that it changes, such as [stages.training]")]
        if problems:
            raise UserError(*problems)
        tables = merged(tables, changes)
        overridden = frozenset(key for key in config.overridden if key not in keys)
        try:
            of_stage = resolve(copied(tables), overridden)
        except UserError as error:
            raise in_stage(error, name) from None
        tokens = None if given.at_tokens is None else int(given.at_tokens)
        stages.append(Stage(name, given.at_step, tokens, entry, replace(of_stage, stage=name)))
    return tuple(stages)


def in_stage(error: UserError, name: str) -> UserError:
    """Return ``error`` with the name of the stage in each problem."""
    return UserError(*(replace(problem, where=f"stage {name!r}: {problem.where}") for problem in error.problems))


def hidden_overrides(stages: Sequence[Stage], overridden: frozenset[str]) -> list[str]:
    """Return a note for each override that a stage replaces."""
    return [
        f"{key} has the value of the override only until stage {stage.name!r}, which sets it, begins"
        for stage in stages
        for key in _keys({name: value for name, value in stage.table.items() if isinstance(value, dict)})
        if key in overridden
    ]


def copied(tables: Table) -> Table:
    """Return a copy of tables, to which keys may be added, and arguments to their tables. They may be nested deeply."""
    copy = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for table in (one for one in copy.values() if isinstance(one, dict)):
        table |= {key: dict(value) for key, value in table.items() if isinstance(value, dict)}
    return copy


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Table:
    """Return ``values`` updated with ``changes``; nested tables are merged."""
    result = dict(values)
    for key, change in changes.items():
        inner = result.get(key)
        result[key] = merged(inner, change) if isinstance(inner, dict) and isinstance(change, dict) else change
    return result


def _keys(tables: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of values that are no tables."""
    keys = []
    for key, value in tables.items():
        keys += _keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return keys
