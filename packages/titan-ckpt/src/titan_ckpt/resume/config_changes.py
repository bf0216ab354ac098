"""Differences between the config of a saved run and that of the job that resumes it. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from titan_core.api import Config, Section, matches
from titan_core.api.config.secrets import redact
from titan_core.toolkit.text import show


@dataclass(frozen=True)
class ConfigChange:
    """A config key whose value changed."""

    key: str
    """``section.name``."""
    before: Any
    now: Any
    decisive: bool
    """Whether the change may affect what is trained (see :attr:`~titan_core.api.Section.may_change`)."""

    def __str__(self) -> str:
        return f"{self.key}: {show(self.before)} -> {show(self.now)}"


def config_changes(
    before: Mapping[str, Mapping[str, Any]], decisive: Collection[str], config: Config, degrees: Collection[str] = ()
) -> list[ConfigChange]:
    """Return the keys whose values differ, except secrets.

    A key that only one of the two configs has (because a plugin was installed, removed or updated) counts as having its
    default value in the other.

    Args:
        before: the saved config, by section and key.
        decisive: :func:`decisive_keys` of the saved config.
        degrees: keys that may change whatever their sections declare (:attr:`titan_core.api.MeshPlan.degree_keys`).
    """
    old, new = (_flat(redact(values)) for values in (before, config.as_dict()))
    fields = _fields(config)
    changes = []
    for key, cls in fields.items():
        default = _default(cls, key)
        saved, now = old.get(key, default), new.get(key)
        if saved != now:
            name = key.partition(".")[2]
            may_change = (key in degrees or matches(name, cls.may_change)) and _is_value(cls, name, saved)
            changes.append(ConfigChange(key, saved, now, decisive=not may_change))
    gone = (key for key in decisive if key not in fields)
    return changes + [ConfigChange(key, old.get(key), None, decisive=True) for key in gone]


def decisive_keys(config: Config, degrees: Collection[str] = ()) -> list[str]:
    """Return the keys that affect what is trained and whose values are not the defaults. ``degrees``: see
    :func:`config_changes`."""
    now = _flat(config.as_dict())
    return sorted(
        key
        for key, cls in _fields(config).items()
        if key not in degrees and not matches(key.partition(".")[2], cls.may_change) and now.get(key) != _default(cls, key)
    )


def _fields(config: Config) -> dict[str, type[Section]]:
    return {f"{cls.section}.{name}": cls for cls in config.sections for name in cls.model_fields}


def _is_value(cls: type[Section], name: str, saved: Any) -> bool:
    """Whether ``saved`` is a valid value of the key. An invalid one is damage, not a change that a user made."""
    if saved is None:
        return True
    try:
        cls.model_validate_json(json.dumps({name: saved}), strict=True)
    except ValidationError as error:
        return not any(mistake["loc"] for mistake in error.errors())  # errors without a key are of rules over several keys
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
