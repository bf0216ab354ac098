"""Fixtures of all suites."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from harness.gloo_pool import GlooPool

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A busy machine is no failure of the code, and the first example may import a library.
settings.register_profile("titan", deadline=None)
settings.load_profile("titan")
# A shell lets what it starts in the background ignore interrupts, which processes that tests start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Living processes for multi-process tests."""
    pool = GlooPool(once_more=True)
    yield pool
    pool.close()


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
