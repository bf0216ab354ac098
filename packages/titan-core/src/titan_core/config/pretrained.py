"""``model.from_pretrained``: a stored model's description becomes config, under the recipe's own keys. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from titan_core.api.checkpoint import Checkpoint
from titan_core.api.components import Model, ModelHub
from titan_core.api.config import Config
from titan_core.api.errors import Problem, UserError
from titan_core.api.registry import ComponentRegistry
from titan_core.api.sections import ModelSection
from titan_core.api.stored_model import StoredModel
from titan_core.api.tools.shown import show

KEY = "model.from_pretrained"
NONE = "none"
"""Stands for ``None`` in ``model.args``, because TOML has no such value."""

_NAME_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_FREE_OF_WEIGHTS = ("max_seq_len",)
"""Arguments that weights do not determine."""

Table = dict[str, Any]


def find_model(path: str, registry: ComponentRegistry) -> StoredModel:
    """See :meth:`titan_core.api.stored_model.StoredModels.find`."""
    readers = [one.find_model for one in registry.all(Checkpoint) if one.find_model is not None]
    if not readers:
        raise UserError.one(path, "no installed plugin reads stored models", "install titan-ckpt")
    located = _located(path, registry)
    problems: list[Problem] = []
    for reader in readers:
        try:
            return reader.load()(located, registry)
        except UserError as error:
            problems += error.problems
    raise UserError(*problems)


def _located(path: str, registry: ComponentRegistry) -> str:
    """Return the folder of a model that a hub knows by the name ``path``; otherwise ``path``, with ``~`` expanded.

    Raises:
        UserError: the name is that of a model which this machine does not have.
    """
    local = Path(path).expanduser()
    try:
        exists = local.exists()
    except OSError:  # such as a name that is too long
        exists = False
    if exists or not _NAME_ON_HUB.fullmatch(path):
        return path if "://" in path else str(local)
    hubs = registry.all(ModelHub)
    if not hubs:
        why = "does not exist, and no installed plugin finds models by name"
        raise UserError.one(path, why, "check the path, or install titan-data")
    problems: list[Problem] = []
    for hub in hubs:
        try:
            return hub.locate.load()(path)
        except UserError as error:
            problems += error.problems
    raise UserError(*problems)


def described_by(stored: StoredModel, registry: ComponentRegistry) -> dict[str, Table]:
    """Return the config sections that describe ``stored``: with the name of its flavor if it has one, and without ``None``,
    which TOML cannot represent."""
    tables = {name: dict(table) for name, table in stored.sections.items()}
    model = tables[ModelSection.section]
    args, flavors = model["args"], registry.get(Model, model["name"]).flavors
    model["flavor"] = next((name for name, flavor in flavors.items() if not _differences(_plain(flavor), args)), "")
    if model["flavor"]:
        of_flavor = _plain(flavors[model["flavor"]])
        args = {key: value for key, value in args.items() if of_flavor.get(key) != value}
    model["args"] = _without_none(args)
    return tables


def lay_under(tables: dict[str, Any], config: Config, registry: ComponentRegistry) -> tuple[str, ...]:
    """Add the keys of the model that ``model.from_pretrained`` names to ``tables``. Keys that are already there are kept if
    they can be combined with the weights.

    Args:
        config: provides the origins of values, for errors.

    Returns:
        What the user should know about the model, one line each.

    Raises:
        UserError: there is no such model, or ``tables`` contradicts its weights.
    """
    recipe = tables.get(ModelSection.section)
    path = recipe.get("from_pretrained") if isinstance(recipe, dict) else None
    if not isinstance(path, str) or not path.strip() or not isinstance(recipe, dict):
        return ()
    try:
        stored = find_model(path, registry)
    except UserError as error:
        if _is_complete(recipe, registry):
            # A run's own config: the run may resume from a checkpoint although the weights are gone.
            reasons = "; ".join(f"{problem.where}: {problem.why}" for problem in error.problems)
            return (f"{KEY} was not read, and is needed unless the run resumes from a checkpoint ({reasons})",)
        where = config.where(KEY, path)
        raise UserError(*(_within(where, path, problem) for problem in error.problems)) from None
    found = described_by(stored, registry)
    described = found.pop(ModelSection.section)
    problems = _contradictions(recipe, stored, config, registry)
    if "tokenizer" not in described and not recipe.get("tokenizer"):
        fix = "set model.tokenizer and model.tokenizer_path (see `titan plugins`)"
        problems.append(Problem(config.where(KEY, path), "its files contain no tokenizer that Titan finds", fix))
    if problems:
        raise UserError(*problems)
    notes = [f"{KEY}: {note}" for note in stored.notes]
    given = {key: value for key, value in recipe.items() if value != "" and key in ("tokenizer", "tokenizer_path")}
    if changed := {key: value for key, value in given.items() if described.get(key, value) != value}:
        shown = ", ".join(f"model.{key} = {show(value, key)}" for key, value in changed.items())
        notes.append(f"{shown} replaces the tokenizer in {path}")
    if described.get("tokenizer") != given.get("tokenizer", described.get("tokenizer")):
        described.pop("tokenizer_path", None)
    flavor = recipe.get("flavor") or described["flavor"]
    theirs, own = stored.sections[ModelSection.section]["args"], recipe.get("args", {})
    free = {key: theirs[key] for key in _FREE_OF_WEIGHTS if key in theirs}
    args = described["args"] if flavor == described["flavor"] else free
    notes += [
        f"model.args.{key} = {show(own[key])} replaces {show(value)}, with which the weights were trained"
        for key, value in free.items()
        if own.get(key, value) != value
    ]
    tables[ModelSection.section] = {**described, **recipe, "flavor": flavor, "args": {**args, **own}}
    for name, table in found.items():
        if isinstance(recipe_table := tables.setdefault(name, {}), dict):
            tables[name] = {**table, **recipe_table}
    return tuple(notes)


def _within(where: str, path: str, problem: Problem) -> Problem:
    why = problem.why if problem.where == path else f"{problem.where}: {problem.why}"
    return Problem(where, why, problem.fix)


def _is_complete(recipe: Mapping[str, Any], registry: ComponentRegistry) -> bool:
    """Whether ``[model]`` says all that the stored model would."""
    if not recipe.get("tokenizer") or recipe.get("name") not in [model.name for model in registry.all(Model)]:
        return False
    flavors = registry.get(Model, recipe["name"]).flavors
    fields = type(next(iter(flavors.values()))).model_fields
    return bool(recipe.get("flavor")) or fields.keys() <= dict(recipe.get("args") or {}).keys()


def _contradictions(
    recipe: Mapping[str, Any], stored: StoredModel, config: Config, registry: ComponentRegistry
) -> list[Problem]:
    """Return the keys of the recipe's ``[model]`` that describe another model than that of the weights."""
    model = stored.sections[ModelSection.section]
    path, args = recipe["from_pretrained"], model["args"]
    name, flavor, own = recipe.get("name") or model["name"], recipe.get("flavor") or "", recipe.get("args", {})
    if name != model["name"]:
        why = f"the weights in {path} are those of model {model['name']!r}"
        return [Problem(config.where("model.name", name), why, "remove the key")]
    problems = []
    flavors = registry.get(Model, name).flavors
    if flavor in flavors and (differs := _differences({**_plain(flavors[flavor]), **_plain(own)}, args)):
        more = f"; and {len(differs) - 3} more" if len(differs) > 3 else ""
        why = f"contradicts the weights in {path}: {'; '.join(differs[:3])}{more}"
        problems.append(Problem(config.where("model.flavor", flavor), why, 'remove the key, or set it to ""'))
    elif not flavor and isinstance(own, dict):
        for key in own.keys() & args.keys():
            if _differences({**args, key: own[key]}, args):
                why = f"contradicts the weights in {path}, for which it is {show(_without_none(args[key]))}"
                problems.append(Problem(config.where(f"model.args.{key}", own[key]), why, "remove the key"))
    return problems


def _differences(mine: Mapping[str, Any], args: Mapping[str, Any]) -> list[str]:
    """Return the arguments in ``mine`` that contradict those of the weights, in words."""
    return [
        f"{key} is {show(mine[key])}, but {show(_without_none(value))} in the weights"
        for key, value in args.items()
        if key in mine and key not in _FREE_OF_WEIGHTS and not _agrees(mine[key], value)
    ]


def _agrees(mine: Any, value: Any) -> bool:
    if isinstance(mine, dict) and isinstance(value, dict):
        return all(key in value and _agrees(one, value[key]) for key, one in mine.items())
    return bool(_without_none(mine) == _without_none(value))


def _plain(args: Any) -> dict[str, Any]:
    if isinstance(args, BaseModel):
        return args.model_dump(mode="json")
    return dict(args) if isinstance(args, Mapping) else {}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items()}
    return NONE if value is None else value
