"""``model.from_pretrained``: a stored model's description becomes config, under the recipe's own keys. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from titan_core.api import Checkpoint, Config, Model, Problem, Ref, Registry, StoredModel, UserError
from titan_core.api._shown import show
from titan_core.api.config.paths import require_nameable
from titan_core.api.config.sections import ModelSection

KEY = "model.from_pretrained"
NONE = "none"
"""Stands for ``None`` in ``model.args``, because TOML has no such value."""

_FREE_OF_WEIGHTS = ("max_seq_len",)
"""Arguments that weights do not determine."""

Table = dict[str, Any]
R = TypeVar("R")


def find_model(path: str, registry: Registry) -> StoredModel:
    """See :meth:`titan_core.api.checkpoint.stored_model.StoredModels.find`."""
    readers = [one.find_model for one in registry.all(Checkpoint) if one.find_model is not None]
    return _first_of(readers, StoredModel, path, registry)


def describe_model(path: str, registry: Registry) -> Mapping[str, Mapping[str, Any]]:
    """Return the config sections of the model at ``path`` (:attr:`.Checkpoint.describe_model`).

    Raises:
        UserError: there is none.
    """
    readers = [one.describe_model for one in registry.all(Checkpoint) if one.describe_model is not None]
    return _first_of(readers, Mapping, path, registry)


def _first_of(readers: Sequence[Ref[Callable[[str, Registry], R]]], result: type[Any], path: str, registry: Registry) -> R:
    """Return the result of the first reader that knows ``path``."""
    if not readers:
        raise UserError.one(path, "no installed plugin reads stored models", "install titan-ckpt")
    problems: list[Problem] = []
    for reader in readers:
        try:
            found: R = reader.call(result, path, registry)
        except UserError as error:
            problems += error.problems
        else:
            return found
    raise UserError(*problems)


def described_by(sections: Mapping[str, Mapping[str, Any]], registry: Registry) -> dict[str, Table]:
    """Return the config sections that describe a stored model: with the name of its flavor if it has one, and without
    ``None``, which TOML cannot represent."""
    tables = {name: dict(table) for name, table in sections.items()}
    model = tables[ModelSection.section]
    model["flavor"], args = "", model["args"]
    for name, flavor in registry.get(Model, model["name"]).flavors.items():
        of_flavor = flavor.model_dump(mode="json")
        if different_arguments(of_flavor, args) == []:
            model["flavor"], args = name, {key: value for key, value in args.items() if of_flavor[key] != value}
            break
    model["args"] = _without_none(args)
    return tables


def different_arguments(
    mine: Mapping[str, Any], stored: Mapping[str, Any], left_out: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the arguments in which two models differ, except those that weights do not determine.

    Args:
        left_out: values of arguments with which ``mine`` may lack something (:attr:`Model.training_only`).
    """
    free = {*_FREE_OF_WEIGHTS, *(key for key, value in (left_out or {}).items() if mine.get(key) == value)}
    return [key for key, value in stored.items() if mine.get(key) != value and key not in free]


def lay_under(tables: dict[str, Any], config: Config, registry: Registry) -> tuple[StoredModel | None, list[str]]:
    """Add the keys of the model that ``model.from_pretrained`` names to ``tables``. Keys that are already there are kept.
    Assembly compares the resulting model with that of the weights.

    Args:
        config: provides the origins of values, for errors.

    Returns:
        The model, if this machine has it, and what the user should know about it, one line each.

    Raises:
        UserError: there is no such model, it belongs to another family, or it has no tokenizer.
    """
    recipe = tables.get(ModelSection.section)
    path = recipe.get("from_pretrained") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(path, str) or not isinstance(recipe.get("args", {}), dict):
        return None, []  # not set, or the validation of the section reports it
    try:
        require_nameable(path)
    except ValueError:
        return None, []
    where = config.where(KEY, path)
    try:
        stored = find_model(path, registry)
    except UserError as error:
        reasons = [one.why if one.where == path else f"{one.where}: {one.why}" for one in error.problems]
        if _is_complete(recipe, registry):
            # A run's own config: the run may resume from a checkpoint although the weights are gone.
            return None, [f"{where}: {'; '.join(reasons)}. It is needed unless the run resumes from a checkpoint"]
        fixes = [one.fix for one in error.problems]
        raise UserError(*(Problem(where, why, fix) for why, fix in zip(reasons, fixes, strict=True))) from None
    found = described_by(stored.sections, registry)
    described = found.pop(ModelSection.section)
    if recipe.get("name", described["name"]) != described["name"]:
        why = f"the weights in {path} are those of model {described['name']!r}"
        raise UserError.one(config.where("model.name", recipe["name"]), why, "remove the key")
    if not (described.get("tokenizer") or recipe.get("tokenizer")):
        fix = "set model.tokenizer and model.tokenizer_path (see `titan plugins`)"
        raise UserError.one(where, "its files contain no tokenizer that Titan finds", fix)
    notes = [f"{KEY}: {note}" for note in stored.notes]
    for key in ("tokenizer", "tokenizer_path"):
        if (own := recipe.get(key)) and described.get(key, own) != own:
            notes.append(f"model.{key} = {show(own, key)} replaces {show(described[key], key)}, which is beside the weights")
            described = {name: value for name, value in described.items() if name != "tokenizer_path"}
    # Another flavor is compared with the weights as it is, but does not lengthen their context.
    theirs = stored.sections[ModelSection.section]["args"]
    flavor = recipe.get("flavor") or described["flavor"]
    args = described["args"]
    if flavor != described["flavor"]:
        args = {key: value for key, value in theirs.items() if key in _FREE_OF_WEIGHTS}
    own_args = recipe.get("args", {})
    tables[ModelSection.section] = {**described, **recipe, "flavor": flavor, "args": {**args, **own_args}}
    for name, table in found.items():
        if isinstance(recipe_table := tables.setdefault(name, {}), dict):
            tables[name] = {**table, **recipe_table}
    return stored, notes


def _is_complete(recipe: Mapping[str, Any], registry: Registry) -> bool:
    """Whether ``[model]`` says all that the stored model would."""
    if not recipe.get("tokenizer") or recipe.get("name") not in [model.name for model in registry.all(Model)]:
        return False
    fields = type(next(iter(registry.get(Model, recipe["name"]).flavors.values()))).model_fields
    return bool(recipe.get("flavor")) or fields.keys() <= recipe.get("args", {}).keys()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items()}
    return NONE if value is None else value
