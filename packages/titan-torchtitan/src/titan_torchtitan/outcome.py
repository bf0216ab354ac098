"""The Titan recipe that an import builds, and what became of each key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_torchtitan.reading import OldRecipe
from titan_torchtitan.rules import with_defaults

Status = Literal["unknown", "unsupported", "changed", "default", "ignored", "same"]
"""What became of a key:

* unknown: TorchTitan itself never had the key;
* unsupported: Titan cannot do what the value requests;
* changed: another name or value says the same, or ``why`` states the difference;
* default: the recipe relied on a default of TorchTitan that differs from Titan's, and now states it;
* ignored: nothing that is trained depends on it;
* same: Titan has the key and the value.
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

    def __init__(
        self, old: OldRecipe, models: Collection[str], datasets: Collection[str] = (), optimizers: Collection[str] = ()
    ) -> None:
        self.old = old
        self.models, self.datasets, self.optimizers = models, datasets, optimizers
        """The names that the installed plugins provide."""
        self.asked = with_defaults(old.given)
        """The keys of the old recipe, and the defaults of TorchTitan that it relied on and Titan does not have."""
        self.values: dict[str, Any] = {}
        """The new recipe, by dotted key."""
        self.entries: list[Entry] = []

    def set(self, key: str, new: Mapping[str, Any], why: str = "") -> None:
        """``key`` of the old recipe, or TorchTitan's default of it, becomes the keys ``new``."""
        self.values.update(new)
        if key not in self.old.written:
            self.entries.append(Entry("default", new=new, why=why or "TorchTitan's default"))
            return
        same = not why and new == {key: self.old.written[key]}
        self.entries.append(Entry("same" if same else "changed", key, self.old.written[key], new, why))

    def ignore(self, key: str, why: str) -> None:
        """Nothing that is trained depends on ``key``."""
        if key in self.old.written:
            self.entries.append(Entry("ignored", key, self.old.written[key], why=why))

    def refuse(self, key: str, why: str, new: Mapping[str, Any] | None = None) -> None:
        """Titan cannot do what the value of ``key`` requests.

        Args:
            new: keys for the new recipe, in which the user must correct the value; `titan config check` refuses it.
        """
        self.values.update(new or {})
        self.entries.append(Entry("unsupported", key, self.old.written[key], new or {}, why))

    @property
    def needs_attention(self) -> bool:
        """Whether a key could not be imported although something may depend on it."""
        return any(entry.status in ("unsupported", "unknown") for entry in self.entries)
