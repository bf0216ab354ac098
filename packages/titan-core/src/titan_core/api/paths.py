"""Settings that name a file or a folder anywhere."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

LONGEST_NAME = 255
"""Bytes in one name of a path, on every common file system."""
LONGEST_PATH = 4000
"""Bytes in a path; Linux takes 4,095, and Titan adds names of its own."""


def require_nameable(path: str) -> str:
    """``path``, if a file system can have it; an address (``s3://bucket/run``) may have longer parts.

    Raises:
        ValueError: it is empty, or too long.
    """
    if not path.strip():
        raise ValueError("must not be empty")
    if len(path.encode(errors="replace")) > LONGEST_PATH:
        raise ValueError(f"must be at most {LONGEST_PATH} bytes long")
    if "://" not in path and any(len(name.encode(errors="replace")) > LONGEST_NAME for name in path.split("/")):
        raise ValueError(f"must have no name longer than {LONGEST_NAME} bytes, which is what file systems take")
    return path


AnyPath = Annotated[str, AfterValidator(require_nameable)]
"""A path, a glob, an address, or the name of something on a hub."""
