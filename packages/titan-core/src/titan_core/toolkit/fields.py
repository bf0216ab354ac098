"""The documentation, choices and types of the fields of sections, for ``--help``, errors, completion and the JSON Schema."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from titan_core.api import AnyPath, Component, Model, Registry
from titan_core.api.config.sections import PluginsSection

MODEL_ARGS = "model.args"
"""The key whose own keys are those of a model family."""


@cache
def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """Return field name -> documentation in one line, from docstrings and ``Field(description=...)``.

    Pydantic can collect docstrings (``use_attribute_docstrings``), but does so for every class on import, which costs every
    command 50 ms.
    """
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        if issubclass(base, BaseModel) and base is not BaseModel:
            docs |= field_docs(base)
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):  # a class without a source file
        definition = ast.ClassDef(name=cls.__name__, bases=[], keywords=[], body=[], decorator_list=[])
    assert isinstance(definition, ast.ClassDef)
    for statement, following in pairwise(definition.body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    described = {name: field.description for name, field in cls.model_fields.items() if field.description}
    return {name: doc for name, doc in (docs | described).items() if name in cls.model_fields}


def field_at(registry: Registry, key: str) -> FieldInfo | None:
    """Return the field of a dotted key, such as ``"training.steps"`` or ``"model.args.n_layers"``, if it exists."""
    section, *path = key.split(".")
    owners: list[type[BaseModel]] = list(registry.sections().get(section, ()))
    here, field = section, None
    for name in path:
        field = next((cls.model_fields[name] for cls in owners if name in cls.model_fields), None)
        if field is None:
            return None
        here = f"{here}.{name}"
        owners = list(model_families(registry).values()) if here == MODEL_ARGS else models_in(field.annotation)
    return field


def model_families(registry: Registry) -> dict[str, type[BaseModel]]:
    """Return model family -> the class of its arguments."""
    return {model.name: type(next(iter(model.flavors.values()))) for model in registry.all(Model) if model.flavors}


def choices_at(registry: Registry, key: str, field: FieldInfo) -> list[str]:
    """Return the values to choose from for a key; empty if it takes any value of its type."""
    named = [component.name for component in registry.all(Component) if key in component.keys]
    if named:
        return named
    if key == "model.flavor":
        return list(dict.fromkeys(flavor for model in registry.all(Model) for flavor in model.flavors))
    if key == f"{PluginsSection.section}.disable":
        return [plugin["name"] for plugin in registry.versions()]
    return choices_of(field.annotation)


def choices_of(annotation: Any) -> list[str]:
    """Return the values of the literals in an annotation; ``true`` and ``false`` for booleans."""
    found: list[str] = []
    for part in _parts(annotation):
        if get_origin(part) is Literal:
            found += map(str, get_args(part))
        elif part is bool:
            found += ["true", "false"]
    return found


def accepts_boolean(field: FieldInfo | None) -> bool:
    """Whether a key may be true or false."""
    return field is not None and bool in _parts(field.annotation)


def accepts_path(field: FieldInfo) -> bool:
    """Whether a key may be the path of a file or folder."""
    check = get_args(AnyPath)[1]
    return check in field.metadata or any(check in getattr(part, "__metadata__", ()) for part in _parts(field.annotation))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation: the classes of a nested table, or of the entries of a list."""
    return [part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]


def model_at(cls: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """Return the model that owns the keys at ``path`` inside ``cls``. Sections nest one list of models at most."""
    if not path:
        return cls
    field = cls.model_fields.get(path[0])
    return next(iter(models_in(field.annotation)), None) if field is not None else None


def type_name(annotation: Any) -> str:
    """Return a readable name of a type for help texts."""
    if annotation in (type(None), None):
        return "none"
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return type_name(get_args(annotation)[0])
    if origin is Literal:
        return "|".join(map(str, get_args(annotation)))
    if origin in (typing.Union, types.UnionType):
        return "|".join(type_name(argument) for argument in get_args(annotation))
    if origin is list:
        return f"[{type_name(get_args(annotation)[0])}, ...]"
    if origin is dict:
        return "{...}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return str(getattr(annotation, "__name__", annotation))


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the annotation and, for unions, lists and annotated types, their members."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for argument in get_args(annotation):
            yield from _parts(argument)
