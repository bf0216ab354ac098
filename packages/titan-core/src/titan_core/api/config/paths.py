"""Settings that name a file or folder at any location."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

LONGEST_NAME = 255
"""Maximum bytes in one name of a path, on every common file system."""
LONGEST_PATH = 4000
"""Maximum bytes in a path. Linux allows 4,095, and Titan appends names of its own."""


def require_nameable(path: str) -> str:
    """Return ``path`` if file systems allow it. The parts of an address (``s3://bucket/run``) may be longer.

    Raises:
        ValueError: it is empty, or too long.
    """
    if not path.strip():
        raise ValueError("must not be empty")
    if len(path.encode(errors="replace")) > LONGEST_PATH:
        raise ValueError(f"must be at most {LONGEST_PATH} bytes long")
    if "://" not in path and any(len(name.encode(errors="replace")) > LONGEST_NAME for name in path.split("/")):
        raise ValueError(f"must not contain a name longer than {LONGEST_NAME} bytes, the limit of file systems")
    return path


AnyPath = Annotated[str, AfterValidator(require_nameable)]
"""A path, a glob, an address, or the name of something on a hub."""
