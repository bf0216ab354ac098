"""Reading TOML that somebody else wrote: whatever it is, it is read or refused with a reason."""

from __future__ import annotations

from typing import Any

import tomli

from titan_core.api.sane_values import DEEPEST

LONGEST = 2**20
"""Bytes of a document. A recipe has a few thousand; a file of gigabytes is no recipe."""


class BadToml(ValueError):
    """A text that is not TOML, or none that Titan reads. Its message says why."""

    def __init__(self, why: str, line: int | None = None) -> None:
        super().__init__(why)
        self.line = line
        """Where, counted from 1; ``None`` where that is not known."""


def parse_toml(text: str) -> dict[str, Any]:
    """``text`` as TOML.

    Raises:
        BadToml: it is not TOML, longer than :data:`LONGEST`, or nested deeper than a config can be.
    """
    if len(text) > LONGEST:
        raise BadToml(f"longer than {LONGEST:,} characters")
    try:
        document = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise BadToml(f"not valid TOML: {error.msg} (column {error.colno})", error.lineno) from None
    except RecursionError:
        raise BadToml("tables or lists are nested too deep") from None
    except ValueError as error:  # not by tomli: an integer of more digits than Python reads
        raise BadToml(f"not valid TOML: {error}") from None
    if _is_deep(document):
        raise BadToml(f"tables or lists are nested more than {DEEPEST} deep")
    return document


def _is_deep(document: dict[str, Any]) -> bool:
    """Whether a value stands deeper than :data:`DEEPEST` below a section's key. Without recursion, which ends sooner."""
    level: list[Any] = [document]
    for _ in range(DEEPEST + 2):  # the document and the section stand above the key
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
    return True
