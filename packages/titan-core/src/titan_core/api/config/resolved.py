"""Resolved configs: typed sections, with the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from titan_core.api._shown import show
from titan_core.api.config.section import Section
from titan_core.api.model.weights import StoredModel
from titan_core.api.plugins.errors import Problem

S = TypeVar("S", bound=Section)

COMMAND_LINE = "command line"
"""Origin of a value that an override set."""


@dataclass(frozen=True)
class Config:
    """The configuration of a job. Sections are looked up by class, so type checkers know their types."""

    source: str
    """Name of the recipe, or path of the file."""
    sections: Mapping[type[Section], Section]
    """The values of every section class of the core and of the discovered plugins."""
    overridden: frozenset[str] = field(default_factory=frozenset)
    """Dotted keys that overrides set."""
    notes: tuple[str, ...] = ()
    """Differences between this config and the recipe that a user should know, one line each: sections that are omitted
    (``plugins.optional``), and how ``model.from_pretrained`` completes ``[model]``."""
    pretrained: StoredModel | None = None
    """The model that ``model.from_pretrained`` names, if this machine has it."""
    overridden_by: str = COMMAND_LINE
    """Where the overrides come from, for error messages."""
    stages: tuple[Stage, ...] = ()
    """The stages that follow, with configs of their own (``[[stages]]``). This config is that of the first."""
    stage: str = ""
    """Name of the stage that this config is of, if it is not the first."""

    def section(self, cls: type[S]) -> S:
        """Return the section of class ``cls``."""
        section = self.sections[cls]
        assert isinstance(section, cls)
        return section

    def where(self, key: str, value: Any = None) -> str:
        """Return the origin of ``key`` for an error message: ``"my.toml: training.steps = 3"``."""
        origin = self.overridden_by if self._is_overridden(key) else self.source
        return f"{origin}: {key}" if value is None else f"{origin}: {key} = {show(value, key)}"

    def problem(self, key: str, why: str, fix: str = "") -> Problem:
        """Return a problem with the current value of ``key`` (``"training.seq_len"``)."""
        return Problem(self.where(key, self.value(key)), why, fix)

    def value(self, key: str) -> Any:
        """Return the value of a dotted key."""
        name, field, *path = key.split(".")
        owners = (section for cls, section in self.sections.items() if cls.section == name and field in cls.model_fields)
        value: Any = next(owners, None)
        for part in (field, *path):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        return value

    def changed(self, values: Mapping[str, Any]) -> Config:
        """Return this config, and those of its stages, with other values of dotted keys, which are not validated. Unknown
        keys are ignored."""
        owners = _owners(tuple(self.sections))
        updates: dict[type[Section], dict[str, Any]] = {}
        for key, value in values.items():
            for cls in owners.get(key, ()):
                updates.setdefault(cls, {})[key.partition(".")[2]] = value
        sections = {
            cls: section.model_copy(update=updates[cls]) if cls in updates else section
            for cls, section in self.sections.items()
        }  # fmt: skip
        stages = tuple(replace(stage, config=stage.config.changed(values)) for stage in self.stages)
        return replace(self, sections=sections, stages=stages)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return all sections and keys as plain values. Keys whose value is ``None`` are omitted, as in TOML."""
        values: dict[str, dict[str, Any]] = {}
        for cls, section in self.sections.items():
            values.setdefault(cls.section, {}).update(section.model_dump(exclude_none=True))
        return values

    def tables(self) -> dict[str, Any]:
        """Return :meth:`as_dict` and the stages, as in TOML."""
        stages = {"stages": [dict(stage.table) for stage in self.stages]} if self.stages else {}
        return {**self.as_dict(), **stages}

    def _is_overridden(self, key: str) -> bool:
        whole = key.partition("[")[0]  # a list entry has the origin of its list
        return any(whole == overridden or overridden.startswith(whole + ".") for overridden in self.overridden)


@lru_cache(maxsize=16)
def _owners(classes: tuple[type[Section], ...]) -> Mapping[str, Sequence[type[Section]]]:
    """Return dotted key -> the sections that have it."""
    found: dict[str, list[type[Section]]] = {}
    for cls in classes:
        for name in cls.model_fields:
            found.setdefault(f"{cls.section}.{name}", []).append(cls)
    return found


@dataclass(frozen=True)
class Stage:
    """A part of a run after its first one."""

    name: str
    at_step: int | None
    """The step after which it begins; ``None``: see ``at_tokens``."""
    at_tokens: int | None
    """Number of tokens, padding included, that the run has read when it begins."""
    table: Mapping[str, Any]
    """The entry of ``[[stages]]``, as in TOML."""
    config: Config
    """The config of the stage: the recipe with the changes of this stage and those before it."""


@dataclass(frozen=True)
class Override:
    """One override as text. ``key`` is dotted, with dashes already replaced by underscores."""

    key: str
    text: str
