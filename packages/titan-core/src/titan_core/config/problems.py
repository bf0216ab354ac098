"""Pydantic's errors as problems with file, key, value, reason and fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from titan_core.api import Problem
from titan_core.toolkit.errors import close_names, nearest
from titan_core.toolkit.fields import choices_of, field_docs, model_at

Where = Callable[[str, Any], str]
"""(dotted key, value) -> readable source of the value."""


def problems_of(
    error: ValidationError, prefix: str, cls: type[BaseModel], raw: Mapping[str, Any], where: Where
) -> list[Problem]:
    """Return the problems in ``error``, raised by the validation of ``raw``, under the key ``prefix``, as ``cls``."""
    problems = []
    for entry in error.errors(include_url=False):
        path = [str(part) for part in entry["loc"]]
        key = "".join([prefix, *(f"[{part}]" if part.isdecimal() else f".{part}" for part in path)])
        value = entry["input"]
        if entry["type"] == "extra_forbidden":
            owner = model_at(cls, path[:-1])
            fields = list(owner.model_fields) if owner is not None else []
            problems.append(Problem(where(key, value), "unknown key", nearest(path[-1], fields)))
        elif entry["type"] == "missing":
            problems.append(Problem(where(key, None), "is required", "add the key"))
        elif not path:
            # A rule over several keys. Its message is clearer than the value of the whole section.
            problems.append(Problem(where(prefix, None), _reason(entry), "change one of them"))
        else:
            names = path[:-1] if path[-1].isdecimal() else path  # an entry of a list is documented by its list
            owner = model_at(cls, names[:-1])
            field = owner.model_fields.get(names[-1]) if owner is not None else None
            fix = _fix(entry["type"], value, field)
            if owner is not None and (about := field_docs(owner).get(names[-1])):
                fix += f" ({key}: {about.rstrip('.')})"
            problems.append(Problem(where(key, value), _reason(entry, bounds_of(field) if field is not None else ""), fix))
    return problems


_RELATIONS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
"""Pydantic's name of a bound -> the bound in words."""


def bounds_of(field: FieldInfo) -> str:
    """Return the bounds of a numeric field, such as ``"greater than 0 and at most 2592000"``; empty without bounds."""
    found = dict(_bounds((field.annotation, *field.metadata)))
    return " and ".join(f"{words} {_number(found[name])}" for name, words in _RELATIONS.items() if name in found)


def _bounds(annotations: Iterable[Any]) -> Iterator[tuple[str, float]]:
    for annotation in annotations:
        if isinstance(annotation, FieldInfo):
            yield from _bounds(annotation.metadata)
        elif get_origin(annotation) is not None:
            yield from _bounds((*get_args(annotation), *getattr(annotation, "__metadata__", ())))
        else:
            yield from (
                (name, getattr(annotation, name))
                for name in _RELATIONS
                if isinstance(getattr(annotation, name, None), int | float)
            )


def _number(value: float) -> str:
    """Return a short form of ``value``: 1e-30 rather than a row of zeros, but 2592000 in full."""
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e16)
    return str(int(value)) if whole else f"{value:g}"


def _fix(kind: str, value: Any, field: FieldInfo | None) -> str:
    close = close_names(value, choices_of(field.annotation)) if isinstance(value, str) and field is not None else []
    if close:
        return f"did you mean {close[0] if kind == 'bool_type' else repr(close[0])}?"
    if kind == "list_type":
        return 'write a list, such as ["a", "b"]'
    return "write true or false" if kind == "bool_type" else "set another value"


def _reason(entry: Any, bounds: str = "") -> str:
    kind, context = entry["type"], entry.get("ctx", {})
    for name, words in _RELATIONS.items():
        if isinstance(context.get(name), int | float):
            return f"must be {words} {_number(context[name])}"
    message = str(entry["msg"]).removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if bounds and kind in ("int_type", "float_type", "int_from_float"):
        message = message.replace("a valid integer", "a whole number", 1).replace("a valid number", "a number", 1)
        return f"{message}, {bounds}"
    return message
