"""The base of every config section."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from titan_core.api.sane_values import require_64_bits, require_sane

ALL_KEYS = ("*",)
"""For :attr:`Section.may_change`: every key of the section."""


class Section(BaseModel):
    """One ``[section]`` of a recipe: a typed, immutable class whose fields' docstrings are the keys' documentation.

    A plugin subclasses it, sets ``section``, and names the class as a component's ``config``. Every key needs a default:
    a job that does not mention a section gets its defaults. Numbers are bounded by the types of
    :mod:`titan_core.api.numbers`; whatever a field says, NaN, infinities and numbers beyond 64 bits are refused. An empty
    text means ``None`` where that is a field's value too.
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
    def _sane(cls, value: Any, info: ValidationInfo) -> Any:
        require_sane(value)
        return none_if_empty(cls, info.field_name, value)

    @field_validator("*", mode="after")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        require_64_bits(value)
        return value


def none_if_empty(cls: type[BaseModel], field: str | None, value: Any) -> Any:
    """``value``, or ``None`` for the empty text of a field of ``cls`` that is a text or ``None``: both mean "not set"."""
    if value != "" or field is None:
        return value
    annotation = cls.model_fields[field].annotation
    return None if {str, type(None)} <= _types(annotation) else value


def _types(annotation: Any) -> set[Any]:
    """The types that a union is made of, without what annotates them."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_types, get_args(annotation)))
    return {annotation}
