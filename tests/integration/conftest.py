"""Fixtures of the tests across packages."""

from __future__ import annotations

import pytest

from harness.third_party import install


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the example plugin of a mixture of experts."""
    folder = tmp_path_factory.mktemp("experts")
    install(folder, "titan-model-moe")
    return str(folder)
