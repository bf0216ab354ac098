"""What has changed between the config of a run that was saved and that of the job that resumes it. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from titan_core.api.config import Config
from titan_core.api.errors import Problem, UserError
from titan_core.api.section import Section
from titan_core.api.tools.patterns import matches
from titan_core.api.tools.secrets import without_secrets
from titan_core.api.tools.shown import show


@dataclass(frozen=True)
class ConfigChange:
    """A key with another value."""

    key: str
    """Dotted."""
    before: Any
    now: Any
    decisive: bool
    """Whether it may not change (:attr:`~titan_core.api.section.Section.may_change`)."""

    def __str__(self) -> str:
        return f"{self.key}: {show(self.before)} -> {show(self.now)}"


@dataclass(frozen=True)
class RefusedChange:
    """Something that a resumed run must not have otherwise than the run that was saved, unless its user allows it."""

    key: str
    """What allows it in ``checkpoint.allow_changed``."""
    problem: Problem
    """Without that key."""
    allowable: bool = True


def refusal(refused: Sequence[RefusedChange], allowed: Sequence[str]) -> UserError:
    """The error of ``refused`` changes: each by itself, and one list of keys that allows all of them.

    Args:
        allowed: the present value of ``checkpoint.allow_changed``, which the list keeps.
    """
    keys = list(dict.fromkeys([*allowed, *(change.key for change in refused if change.allowable)]))
    hint = f"checkpoint.allow_changed = {json.dumps(keys, ensure_ascii=False)}"
    problems = list(dict.fromkeys(change.problem for change in refused))
    if not all(change.allowable for change in refused):
        return UserError(*problems)
    if len(problems) == 1:
        problem = problems[0]
        return UserError(replace(problem, fix=f"{problem.fix}; or, to continue with the change, {hint}"))
    return UserError(*problems, Problem("", f"to continue with all of these changes, {hint}"))


def config_changes(before: Mapping[str, Mapping[str, Any]], decisive: Collection[str], config: Config) -> list[ConfigChange]:
    """The keys whose values differ, secrets left out.

    A key that only one of the two configs knows (a plugin was installed or removed, or has a new version) counts as having
    its default in the other.

    Args:
        before: the config that was saved, by section and key.
        decisive: its :func:`decisive_keys`.
    """
    old, new = (_flat(without_secrets(one)) for one in (before, config.as_dict()))
    fields = _fields(config)
    changes = []
    for key, cls in fields.items():
        default = _default(cls, key)
        one, other = old.get(key, default), new.get(key)
        if one != other:
            name = key.partition(".")[2]
            may_change = matches(name, cls.may_change) and _is_value(cls, name, one)
            changes.append(ConfigChange(key, one, other, decisive=not may_change))
    gone = (key for key in decisive if key not in fields)
    return changes + [ConfigChange(key, old.get(key), None, decisive=True) for key in gone]


def decisive_keys(config: Config) -> list[str]:
    """The keys that decide what is trained, and have other values than their defaults."""
    now = _flat(config.as_dict())
    return sorted(
        key
        for key, cls in _fields(config).items()
        if not matches(key.partition(".")[2], cls.may_change) and now.get(key) != _default(cls, key)
    )


def _fields(config: Config) -> dict[str, type[Section]]:
    return {f"{cls.section}.{name}": cls for cls in config.sections for name in cls.model_fields}


def _is_value(cls: type[Section], name: str, saved: Any) -> bool:
    """Whether the key may have the value ``saved`` at all: a damaged one is no change that a user has made."""
    if saved is None:
        return True
    try:
        cls.model_validate_json(json.dumps({name: saved}), strict=True)
    except ValidationError as error:
        return not any(one["loc"] for one in error.errors())  # rules over several keys are not about this one
    return True


def _flat(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    flat = {f"{section}.{key}": value for section, table in config.items() for key, value in table.items()}
    plain: dict[str, Any] = json.loads(json.dumps(flat, default=str))
    return plain


def _default(cls: type[Section], key: str) -> Any:
    name = key.partition(".")[2]
    if cls.model_fields[name].is_required():
        return None
    return cls.model_construct().model_dump(include={name}, mode="json", exclude_none=True).get(name)
