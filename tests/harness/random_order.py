"""Tests in random order: ``--random-order SEED``."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Shuffle the files, and the tests of each file, which share fixtures. A seed gives the same order on every worker."""
    by_file: dict[Any, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    files = _shuffled(list(by_file), seed)
    items[:] = [item for file in files for item in _shuffled(by_file[file], f"{seed} {file.name}")]


def _shuffled(entries: list[T], seed: int | str) -> list[T]:
    return random.Random(seed).sample(entries, len(entries))
