"""Which columns of a table a dataset reads, and their types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.types

from titan_core.api import UserError
from titan_data.records import FIELD_FIX, missing_field


def is_text(of: pyarrow.DataType) -> bool:
    """Whether a column contains texts."""
    if pyarrow.types.is_dictionary(of):
        return is_text(of.value_type)
    types = pyarrow.types
    return bool(types.is_string(of) or types.is_large_string(of) or types.is_string_view(of))


def is_integers(of: pyarrow.DataType) -> bool:
    """Whether a column contains lists of integers."""
    types = pyarrow.types
    if not (types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of) or types.is_list_view(of)):
        return False
    return bool(types.is_integer(of.value_type))


@dataclass(frozen=True)
class Columns:
    """The columns that a dataset reads."""

    needed: str | None = None
    """Each file must have it."""
    fits: Callable[[pyarrow.DataType], bool] = is_text
    """Whether the needed column has the right type."""
    what: str = "text"
    """What the needed column contains, for errors."""
    fix: str = FIELD_FIX
    others: tuple[str, ...] | None = ()
    """Read from files that have them; ``None``: all."""

    def of(self, schema: pyarrow.Schema, file: Path) -> list[str]:
        """Return the columns to read from ``file``.

        Raises:
            UserError: the needed one is missing, is there twice, or has another type.
        """
        names = schema.names
        if self.needed is not None:
            if self.needed not in names:
                raise UserError.one(str(file), missing_field(self.needed, names), self.fix)
            if names.count(self.needed) > 1:
                raise UserError.one(str(file), f"has two columns {self.needed!r}", "rename one")
            if not self.fits(found := schema.field(self.needed).type):
                raise UserError.one(str(file), f"column {self.needed!r} contains {found}, not {self.what}", self.fix)
        unique = [name for name in names if names.count(name) == 1]
        wanted = [name for name in unique if self.others is None or name in self.others or name == self.needed]
        return wanted or unique  # none of them: the reader lists what there is
