"""The base of every config section."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator

from titan_core.config.sane_values import require_sane

ALL_KEYS = ("*",)
"""For :attr:`Section.may_change`: every key of the section."""


class Section(BaseModel):
    """One ``[section]`` of a recipe: a typed, immutable class whose fields' docstrings are the keys' documentation.

    A plugin subclasses it, sets ``section``, and names the class as a component's ``config``. Every key needs a default:
    a job that does not mention a section gets its defaults. Numbers are bounded by the types of
    :mod:`titan_core.config.numbers`; whatever a field says, NaN, infinities and numbers beyond 64 bits are refused.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, defer_build=True, allow_inf_nan=False, validate_default=True
    )

    section: ClassVar[str]
    """The section's name in TOML. Several classes may share one, each with keys of its own: a plugin adds keys to a
    section of the core's (``[parallelism]``) by a class of that name."""

    may_change: ClassVar[tuple[str, ...]] = ()
    """Patterns of the keys that a resumed run may have other values of: what they decide is where and how fast a run
    computes, or what is observed, and not what is trained. By default none: a resumed run whose value of another key has
    changed is refused, unless its user allows it (``checkpoint.allow_changed``)."""

    @field_validator("*", mode="before")
    @classmethod
    def _sane(cls, value: Any) -> Any:
        require_sane(value)
        return value
