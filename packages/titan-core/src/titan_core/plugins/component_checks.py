"""Checks of registered components against the contract, at discovery: a malformed component marks its plugin as broken,
with a reason, instead of failing in the middle of a job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, ValidationError

from titan_core.api import (
    Checkpoint,
    Checks,
    Command,
    Component,
    MeshDim,
    MeshUse,
    MeshView,
    Phase,
    Planning,
    Ref,
    Section,
    Slot,
    StepUse,
    WeightFormat,
)
from titan_core.api.plugins.errors import shown
from titan_core.plugins.guard import Origin

MOST_COMPONENTS = 10_000
"""Limit for one hook, which may be an endless generator."""
LONGEST_NAME = 100
Group: TypeAlias = MeshUse | Checks | StepUse | Planning
GROUPS: Final[dict[object, type]] = {cls.__name__: cls for cls in (MeshUse, Checks, StepUse, Planning)}
"""Annotation of a component's field -> the dataclass, whose fields are checked and guarded like the component's."""
_SECTION = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class PluginError(Exception):
    """The reason why a plugin is unusable; becomes :attr:`titan_core.plugins.discovery.BrokenPlugin.reason`."""


def components_from(hook: str, kind: type[Component], result: object) -> list[Component]:
    """Return the ``result`` of registration hook ``hook`` as a list of components of ``kind``.

    Raises:
        PluginError: ``result`` is not a list of valid components.
        Exception: ``result`` is a generator, and it raised.
    """
    example = f"return a list of {kind.__name__}s"
    if isinstance(result, Component):
        raise PluginError(f"hook {hook} returned one {type(result).__name__}; {example}")
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise PluginError(f"hook {hook} returned {shown(result)}; {example}")
    found = list(islice(result, MOST_COMPONENTS + 1))
    if len(found) > MOST_COMPONENTS:
        raise PluginError(f"hook {hook} returned more than {MOST_COMPONENTS} components; {example}")
    for component in found:
        if not isinstance(component, kind):
            raise PluginError(f"hook {hook} returned {shown(component)}, which is not a {kind.__name__}")
        if flaw := flaw_of(component):
            raise PluginError(f"hook {hook} returned {_called(component)} {flaw}")
    return found


def flaw_of(component: Component) -> str:
    """Return what is wrong with ``component``, such as ``"whose name is empty"``; an empty string if it is valid."""
    if flaw := _flaw_of_fields(component):
        return f"whose {flaw}"
    if flaw := _flaw_of_name(component):
        return f"whose name {flaw}"
    if isinstance(component, Checkpoint) and (component.build is None) != (component.active is None):
        return "that has only one of build and active; set both, or neither if it only reads models (find_model)"
    return ""


def _flaw_of_fields(holder: Component | Group, prefix: str = "") -> str:
    for field in fields(holder):
        value: Any = getattr(holder, field.name)
        optional = str(field.type).endswith("| None")
        if field.type in GROUPS:
            flaw = _a(GROUPS[field.type])(value)
            if flaw := f"{field.name} {flaw}" if flaw else _flaw_of_fields(value, f"{field.name}."):
                return flaw
            continue
        rule = next((rule for start, rule in RULES.items() if str(field.type).startswith(start)), None)
        assert rule is not None, f"no rule for {type(holder).__name__}.{field.name}: {field.type}"
        flaw = "" if value is None and optional else rule(value)
        if flaw:
            return f"{prefix}{field.name} {flaw}"
    return ""


def with_origin(component: Component, origin: Origin) -> Component:
    """Return ``component`` with every function guarded, so that its exceptions are reported with the plugin's name."""
    named = replace(origin, component=f"{component.kind} {component.name!r}")
    return replace(component, **_guarded_fields(component, named))


def _guarded_fields(
    holder: Component | Group | WeightFormat | Slot[Any], origin: Origin, prefix: str = ""
) -> dict[str, Any]:
    """Return the guarded values of the fields that have functions. ``prefix``: of the names of a component's group."""
    guarded: dict[str, Any] = {}
    for field in fields(holder):
        value = getattr(holder, field.name)
        if isinstance(value, Ref):
            guarded[field.name] = replace(value, origin=origin, purpose=f"{prefix}{field.name}")
        elif field.type in GROUPS:
            guarded[field.name] = replace(value, **_guarded_fields(value, origin, f"{field.name}."))
        elif str(field.type).startswith("Callable[") and value is not None:
            guarded[field.name] = partial(origin.call, field.name, value)
        elif str(field.type).startswith(("tuple[WeightFormat", "tuple[Slot")):
            guarded[field.name] = tuple(replace(one, **_guarded_fields(one, origin)) for one in value)
    return guarded


def _flaw_of_name(component: Component) -> str:
    name = component.name
    if not name.strip():
        return "is empty"
    if name != name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        return f"{shown(name)} is not one line of at most {LONGEST_NAME} printable characters"
    if isinstance(component, Command) and (len(name.split(" ")) > 2 or name.startswith("-")):
        return f"{name!r} is not one word or two"
    return ""


def _a(kind: type, hint: str = "") -> Callable[[object], str]:
    """Return the rule of values that must be instances of ``kind``; ``hint`` follows the reason."""
    return lambda value: "" if isinstance(value, kind) else f"is {shown(value)}, not a {kind.__name__}{hint}"


def _function(value: object) -> str:
    if isinstance(value, Ref):
        return "is a Ref; it must be a plain function, because it is called during assembly"
    return "" if callable(value) else f"is {shown(value)}, not a function"


def _all_of(kind: type) -> Callable[[object], str]:
    def rule(value: object) -> str:
        if not isinstance(value, tuple | list):
            return f"is {shown(value)}, not a tuple of {kind.__name__}"
        wrong = [item for item in value if not isinstance(item, kind)]
        return f"contains {shown(wrong[0])}, not a {kind.__name__}" if wrong else ""

    return rule


def _fraction(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return ""
    return f"is {shown(value)}, not a number of at least 0 and less than 1"


def _flavors(value: object) -> str:
    if not isinstance(value, Mapping):
        return f"is {shown(value)}, not a mapping from flavor names to arguments"
    if not value:
        return "is empty; a model needs at least one flavor"
    for name, args in value.items():
        if not isinstance(name, str) or not name.strip():
            return f"contains a flavor named {shown(name)}"
        if isinstance(args, type):
            return f"contains the class {args.__name__} for {name!r}; it must be an instance"
        if not isinstance(args, BaseModel):
            return f"contains {shown(args)} for {name!r}; it must be a pydantic model"
    classes = {type(args).__name__ for args in value.values()}
    return f"contains arguments of several classes: {', '.join(sorted(classes))}" if len(classes) > 1 else ""


def _values_of_keys(value: object) -> str:
    if not isinstance(value, Mapping):
        return f"is {shown(value)}, not a mapping from config keys to values"
    wrong = [one for one in value.values() if not isinstance(one, tuple | list)]
    return f"contains {shown(wrong[0])}, not a tuple of values" if wrong else ""


def _section(value: object) -> str:
    """A section class must be complete: a job validates every section, even those that its recipe omits."""
    if not (isinstance(value, type) and issubclass(value, Section)):
        return f"is {shown(value)}, not a subclass of Section"
    name = getattr(value, "section", None)
    if not isinstance(name, str) or not _SECTION.fullmatch(name):
        return f'{value.__name__} needs a section name: section: ClassVar[str] = "my_section", not {shown(name)}'
    for key, field in value.model_fields.items():
        if field.is_required():
            return f"{value.__name__} has a key without a default: {key}"
    try:
        value()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return f"{value.__name__} rejects its own default: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except Exception as error:  # noqa: BLE001 - third-party code may raise anything; it becomes the plugin's reason
        why = " ".join(str(error).partition("\n\nFor further information")[0].split())
        return f"{value.__name__} cannot be instantiated: {type(error).__name__}: {why}"
    return ""


def _called(component: Component) -> str:
    name = component.name if isinstance(component.name, str) else ""
    return f"{type(component).__name__} {name[:LONGEST_NAME]!r}"


RULES: Final[dict[str, Callable[[object], str]]] = {
    "str": _a(str),
    "bool": _a(bool),
    "float": _fraction,
    "type[Section]": _section,
    "Ref[": _a(Ref, ': write Ref("package.module:function"), which is imported only when a job needs it'),
    "Callable[": _function,
    "Phase": _a(Phase, " such as Phase.DATA"),
    "tuple[str": _all_of(str),
    "tuple[MeshDim": _all_of(MeshDim),
    "tuple[MeshView": _all_of(MeshView),
    "tuple[WeightFormat": _all_of(WeightFormat),
    "tuple[Slot": _all_of(Slot),
    "Mapping[str, BaseModel]": _flavors,
    "Mapping[str, Sequence[Any]]": _values_of_keys,
    "Mapping[str, Any]": _a(Mapping),
}
"""Annotation of a component's field (its beginning) -> function that returns what is wrong with a value."""
