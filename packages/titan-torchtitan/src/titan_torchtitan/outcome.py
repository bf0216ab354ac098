"""The Titan recipe that an import builds, and what became of each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from titan_torchtitan.reading import Given, OldRecipe

Status = Literal["same", "changed", "default", "ignored", "unsupported", "unknown"]
"""What became of a key:

* same: Titan has the key and the value;
* changed: another name or value says the same, or ``why`` states the difference;
* default: the recipe relied on a default of TorchTitan that differs from Titan's, and now states it;
* ignored: nothing that is trained depends on it;
* unsupported: Titan cannot do what the value requests;
* unknown: TorchTitan itself never had the key.
"""


@dataclass(frozen=True)
class Entry:
    """What became of one key."""

    status: Status
    old: str = ""
    """The key as the recipe has it; empty for defaults."""
    value: Any = None
    """Its value as the recipe has it."""
    new: Mapping[str, Any] = field(default_factory=dict)
    """The keys of Titan that say the same."""
    why: str = ""
    """The reason, and what to do."""


class ImportOutcome:
    """Collects the values of the new recipe. Each key of the old one is accounted for exactly once."""

    def __init__(self, old: OldRecipe) -> None:
        self.old = old
        self.values: dict[str, Any] = {}
        """The new recipe, by dotted key."""
        self.entries: list[Entry] = []
        self._open = dict(old.given)

    def keep(self, *keys: str, why: str = "") -> None:
        """Keys that the old recipe sets, if it does, mean the same in Titan under the same name."""
        for key in keys:
            if self.old.has(key):
                self.set(key, {key: self.old.get(key)}, why)

    def set(self, key: str, new: Mapping[str, Any], why: str = "") -> None:
        """Key ``key``, if the old recipe sets it, becomes the keys ``new``."""
        if key not in self._open:
            return
        self.values.update(new)
        for given in self._take(key):
            same = not why and dict(new) == {given.name: given.value}
            self.entries.append(Entry("same" if same else "changed", given.name, given.value, dict(new), why))

    def note(self, key: str, why: str) -> None:
        """State another difference of ``key``, which has been accounted for."""
        names = {given.name for given in self.old.given[key]}
        for index, entry in enumerate(self.entries):
            if entry.old in names:
                whole = f"{entry.why}; {why}" if entry.why else why
                self.entries[index] = replace(entry, status="changed", why=whole)

    def default(self, key: str, value: Any, why: str = "TorchTitan's default") -> None:
        """The old recipe relied on a default that Titan does not have."""
        self.values[key] = value
        self.entries.append(Entry("default", new={key: value}, why=why))

    def ignore(self, why: str, *keys: str) -> None:
        """Nothing that is trained depends on ``keys``."""
        for key in keys:
            for given in self._take(key):
                self.entries.append(Entry("ignored", given.name, given.value, why=why))

    def refuse(self, key: str, why: str, new: Mapping[str, Any] | None = None) -> None:
        """Titan cannot do what the value of ``key`` requests.

        Args:
            new: keys for the new recipe, in which the user must correct the value; `titan config check` refuses it.
        """
        if new and key in self._open:
            self.values.update(new)
        for given in self._take(key):
            self.entries.append(Entry("unsupported", given.name, given.value, new or {}, why))

    def close(self) -> None:
        """Add the unknown keys. Every known key must have been accounted for."""
        assert not self._open, f"keys without a rule: {', '.join(self._open)}"
        for name, value in self.old.unknown.items():
            why = "not a key of TorchTitan: perhaps of a fork, or of a custom config module"
            self.entries.append(Entry("unknown", name, value, why=why))

    @property
    def needs_attention(self) -> bool:
        """Whether a key could not be imported although something may depend on it."""
        return any(entry.status in ("unsupported", "unknown") for entry in self.entries)

    def _take(self, key: str) -> tuple[Given, ...]:
        return self._open.pop(key, ())
