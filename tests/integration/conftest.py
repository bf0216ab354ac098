"""Fixtures of the tests across packages."""

from __future__ import annotations

import pytest

from harness.third_party import install


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the example plugins of a mixture of experts and of expert parallelism."""
    folder = tmp_path_factory.mktemp("experts")
    install(folder, "titan-model-moe", "titan-expert-parallel")
    return str(folder)
