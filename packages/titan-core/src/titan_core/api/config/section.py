"""The base class of all config sections."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from titan_core.api.config._sane_values import require_64_bits, require_sane

ALL_KEYS = ("*",)
"""For :attr:`Section.may_change`: every key of the section."""


class Section(BaseModel):
    """One ``[section]`` of a recipe: a typed, immutable class. The docstrings of its fields document the keys.

    A plugin subclasses it, sets ``section``, and names the class as a component's ``config``. Every key needs a default, for
    jobs that do not mention the section. Types such as :data:`~titan_core.api.PositiveInt` bound numbers; NaN, infinities
    and numbers beyond 64 bits are always refused. For a field that may be a string or ``None``, the empty string means
    ``None``.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, defer_build=True, allow_inf_nan=False, validate_default=True
    )

    section: ClassVar[str]
    """The section's name in TOML. Several classes with different keys may share a name. A plugin adds keys to a core section
    (``[parallelism]``) by a class with that section's name."""

    may_change: ClassVar[tuple[str, ...]] = ()
    """Patterns of the keys that a resumed run may change. They affect where and how fast a run computes, or what is
    observed, but not what is trained. Default: none. A resumed run that changes any other key is refused, unless its user
    allows the change (``checkpoint.allow_changed``)."""

    @field_validator("*", mode="before")
    @classmethod
    def _sane(cls, value: Any, info: ValidationInfo) -> Any:
        require_sane(value)
        return none_if_empty(cls, info.field_name, value)

    @field_validator("*", mode="after")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        require_64_bits(value)
        return value


def none_if_empty(cls: type[BaseModel], field: str | None, value: Any) -> Any:
    """Return ``None`` if ``value`` is an empty string and the field may be a string or ``None``; otherwise ``value``."""
    if value != "" or field is None:
        return value
    annotation = cls.model_fields[field].annotation
    return None if {str, type(None)} <= _types(annotation) else value


def _types(annotation: Any) -> set[Any]:
    """Return the members of a union, without annotations."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_types, get_args(annotation)))
    return {annotation}
