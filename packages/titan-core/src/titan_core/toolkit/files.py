"""Opening files that others may have written."""

from __future__ import annotations

from titan_core.api._files import (
    LONGEST as LONGEST,
    LONGEST_TABLE as LONGEST_TABLE,
    open_file as open_file,
    read_bytes as read_bytes,
    read_text as read_text,
    regular as regular,
)
from titan_core.api.config._sane_values import LOCALE_FIX as LOCALE_FIX, encoding_flaw as encoding_flaw
