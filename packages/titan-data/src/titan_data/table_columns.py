"""Chooses the columns of a table that a dataset reads, and checks their types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.types

from titan_core.api import UserError
from titan_data.arrow_values import Conversion, UnreadableType, conversion, features_of
from titan_data.records import FIELD_FIX, missing_field

_UNREADABLE_FIX = (
    "write the file without the column, or with texts, numbers, lists and structs; a template in data.format reads only the "
    "columns that it names"
)


def is_text(of: pyarrow.DataType) -> bool:
    """Whether a column contains texts, or values of JSON, which may be texts."""
    if pyarrow.types.is_dictionary(of):
        return is_text(of.value_type)
    types = pyarrow.types
    return isinstance(of, pyarrow.JsonType) or bool(
        types.is_string(of) or types.is_large_string(of) or types.is_string_view(of)
    )


def is_integers(of: pyarrow.DataType) -> bool:
    """Whether a column contains lists of integers."""
    types = pyarrow.types
    if not (types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of)):
        return False
    return bool(types.is_integer(of.value_type) or types.is_null(of.value_type))  # null: all lists are empty


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
    named: tuple[str, ...] | None = None
    """Of these, those that the reader uses; ``None``: all. Others are left out if they have a type that is not read."""
    may_be_null: bool = False
    """Whether the needed column may have the type null, so that all of a file's records are corrupt."""

    def of(self, schema: pyarrow.Schema, file: Path) -> dict[str, Conversion]:
        """Return the columns to read from ``file``, and what converts their values.

        Raises:
            UserError: the needed one is missing, is there twice, or has another type; one has a type that is not read.
        """
        names = schema.names
        if self.needed is not None:
            if self.needed not in names:
                raise UserError.one(str(file), missing_field(self.needed, names), self.fix)
            if names.count(self.needed) > 1:
                raise UserError.one(str(file), f"has two columns {self.needed!r}", "rename one")
            found = schema.field(self.needed).type
            if pyarrow.types.is_null(found):
                if not self.may_be_null:
                    why = f"column {self.needed!r} contains only nulls, not {self.what}"
                    raise UserError.one(str(file), why, f'{self.fix}, or data.on_corrupt = "skip"')
            elif not self.fits(found):
                raise UserError.one(str(file), f"column {self.needed!r} contains {found}, not {self.what}", self.fix)
        unique = [name for name in names if names.count(name) == 1]
        wanted = [name for name in unique if self.others is None or name in self.others or name == self.needed]
        features, read = features_of(schema), dict[str, Conversion]()
        refused: list[UserError] = []
        for name in wanted or unique:  # none of them: the reader lists what there is
            try:
                read[name] = conversion(schema.field(name), features.get(name))
            except UnreadableType as error:
                why = f"column {name!r} contains {error}, which is not read"
                refused.append(UserError.one(str(file), why, _UNREADABLE_FIX))
                if wanted and (self.named is None or name in self.named):
                    raise refused[-1] from None
        if refused and not read:
            raise refused[0]
        return read
