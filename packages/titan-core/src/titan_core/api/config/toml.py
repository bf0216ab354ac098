"""Reading untrusted TOML: it is either read, or refused with a reason."""

from __future__ import annotations

from typing import Any

import tomli

from titan_core.api.config._sane_values import DEEPEST

LONGEST = 2**20
"""Maximum characters of a document. A recipe has a few thousand; a file of gigabytes is not a recipe."""


class BadToml(ValueError):
    """The text is not TOML, or not TOML that Titan accepts. The message gives the reason."""

    def __init__(self, why: str, line: int | None = None) -> None:
        super().__init__(why)
        self.line = line
        """Line of the mistake, counted from 1; ``None`` if unknown."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parse ``text`` as TOML.

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
        raise BadToml("tables or lists are nested too deeply") from None
    except ValueError as error:  # not from tomli: an integer with more digits than Python converts
        raise BadToml(f"not valid TOML: {number_flaw(error)}") from None
    if _is_deep(document):
        raise BadToml(f"tables or lists are nested more than {DEEPEST} deep")
    return document


def number_flaw(error: ValueError) -> str:
    """Return the message of an error about a text with numbers. For an integer with more digits than Python converts, the
    message names a function of Python that its user should call."""
    return "an integer has more than 4,300 digits" if "integer string conversion" in str(error) else str(error)


def _is_deep(document: dict[str, Any]) -> bool:
    """Whether a value is nested more than :data:`DEEPEST` below a section's key. Not recursive: recursion has a limit."""
    level: list[Any] = [document]
    for _ in range(DEEPEST + 2):  # plus the document and the section, which are above the key
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
    return True
