"""Limits of the memory for a record, and for records that are decoded together: no file of a stranger takes more.

A record has ``data.max_record_bytes``. Python's objects may take fifty times as much as the JSON that describes them, and a
page, batch or window is held twice while it is decoded: with the default of 16 MiB, none of them needs more than 800 MiB.
"""

from __future__ import annotations

from typing import Final

from titan_core.api import CorruptRecord, UserError

DEFAULT: Final = 2**24
KEY: Final = "data.max_record_bytes"
TOGETHER: Final = 24
"""What is decoded together with others may take this many times as much as a record."""
LOCATED: Final = 8
"""Records that are larger by this factor end the search for where records begin: the file has another form, or no end."""


class TooLarge(Exception):
    """Rows take more memory than they may: the page, batch or group that contains them does."""

    def __init__(self, what: str, size: int) -> None:
        super().__init__(what, size)
        self.what, self.size = what, size


def too_large(place: str, size: int, limit: int, what: str = "the record", times: int = 1) -> CorruptRecord:
    """Return the error that ``what`` takes ``size`` bytes, which is more than ``times`` the limit."""
    allowed = f"{KEY} = {limit}" if times == 1 else f"{times} times {KEY} = {limit}"
    return CorruptRecord(
        place, f"{what} takes {size:,} bytes, more than {allowed} allows", f"set {KEY} = {-(-size // times)}"
    )


def endless(place: str, limit: int, what: str) -> UserError:
    """Return the error that ``what``, whose end has not been found, takes more than the limit."""
    why = f"{what} takes more than {limit:,} bytes, and has no end yet"
    return UserError.one(place, why, f"check that the file has the form that its name says; if it has, raise {KEY}")
