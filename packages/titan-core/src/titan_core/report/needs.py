"""What drawing needs, and titan-core alone does not bring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from titan_core.api.errors import UserError


@contextmanager
def extra_needed(what: str) -> Iterator[None]:
    """Import a package of the extra ``titan-core[report]`` inside.

    Raises:
        UserError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ("plotly", "matplotlib"):
            raise
        raise UserError.one(what, f"needs {name}, which is not installed", "install titan-core[report]") from None
