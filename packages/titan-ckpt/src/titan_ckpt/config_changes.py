"""What has changed between the config of a run that was saved and that of the job that resumes it. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from titan_core.api.config import Config
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
