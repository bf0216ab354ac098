"""The base of every config section."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One ``[section]`` of a recipe: a typed, immutable class whose fields' docstrings are the keys' documentation.

    A plugin subclasses it, sets ``section``, and names the class as a component's ``config``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    section: ClassVar[str]
    """The section's name in TOML. Several classes may share one, each with keys of its own: a plugin adds keys to a
    section of the core's (``[parallelism]``) by a class of that name."""
