"""Families on one device, against a plain loop of the library from the same weights on the same batches. The meshes are in
``tests/integration/test_hf_families.py``; ``benchmarks/hf_families.py`` makes the whole table."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.hf_families import FAMILIES, config_of, gradient_difference, largest_difference, settings, train_and_reference

QUICK = ("llama", "qwen3")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_equals_the_library(tmp_path: Path, family: str) -> None:
    found, expected = train_and_reference(family, settings(family, "one", None, tmp_path))
    assert largest_difference(found.losses, expected.losses) < 2e-6
    assert gradient_difference(found.gradients, expected.gradients)[0] < 1e-5


def test_the_reference_notices_a_different_model(tmp_path: Path) -> None:
    """The comparison above would find a wrong frequency."""
    rope = {**config_of("llama")[1]["rope_parameters"], "factor": 8.0}
    found, expected = train_and_reference("llama", settings("llama", "one", None, tmp_path), rope_parameters=rope)
    assert largest_difference(found.losses, expected.losses) > 1e-4
