"""A resolved config: every section typed, and each value's origin known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from titan_core.api.errors import Problem
from titan_core.api.section import Section
from titan_core.api.tools.shown import show

S = TypeVar("S", bound=Section)

COMMAND_LINE = "command line"
"""Where a value came from that an override set."""


@dataclass(frozen=True)
class Config:
    """What a job is made from. Sections are looked up by class, so that their types are known to the checker."""

    source: str
    """The recipe's name or the file's path."""
    sections: Mapping[type[Section], Section]
    """Every section class of the core and of the discovered plugins, with its values."""
    overridden: frozenset[str] = field(default_factory=frozenset)
    """Dotted keys that the command line gave."""

    def section(self, cls: type[S]) -> S:
        """The section of class ``cls``."""
        section = self.sections[cls]
        assert isinstance(section, cls)
        return section

    def where(self, key: str, value: Any = None) -> str:
        """Where ``key`` came from, for an error: ``"my.toml: training.steps = 3"``."""
        origin = COMMAND_LINE if self._is_overridden(key) else self.source
        return f"{origin}: {key}" if value is None else f"{origin}: {key} = {show(value, key)}"

    def problem(self, key: str, why: str, fix: str = "") -> Problem:
        """A problem with the present value of ``key`` (``"training.seq_len"``)."""
        return Problem(self.where(key, self.value(key)), why, fix)

    def value(self, key: str) -> Any:
        """The value of a dotted key."""
        name, field, *path = key.split(".")
        owners = (one for cls, one in self.sections.items() if cls.section == name and field in cls.model_fields)
        value: Any = next(owners, None)
        for part in (field, *path):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        return value

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """All sections and keys as plain values; keys that are ``None`` are left out, as TOML cannot say them."""
        values: dict[str, dict[str, Any]] = {}
        for cls, section in self.sections.items():
            values.setdefault(cls.section, {}).update(section.model_dump(exclude_none=True))
        return values

    def _is_overridden(self, key: str) -> bool:
        whole = key.partition("[")[0]  # an entry of a list is where the list is
        return any(whole == given or given.startswith(whole + ".") for given in self.overridden)


@dataclass(frozen=True)
class Override:
    """One override, as text: ``key`` is dotted, with dashes already turned into underscores."""

    key: str
    text: str
