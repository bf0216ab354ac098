"""Values in few characters."""

from __future__ import annotations

import pytest

from titan_core.toolkit.text import describe_model, show_bytes, show_count


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0"), (512, "512"), (999, "999"), (1000, "1.0K"), (1_255_040, "1.3M"), (9_552_768, "9.6M"),
        (99_940_000, "99.9M"), (99_960_000, "100M"), (999_499_999, "999M"), (999_500_000, "1.0B"),
        (405_853_388_800, "406B"), (10**13, "10.0T"), (10**16, "10000T"),
    ],
)  # fmt: skip
def test_counts(count: int, shown: str) -> None:
    assert show_count(count) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (102_400, "100.0 KiB"),
        (16.1 * 2**30, "16.1 GiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_sizes(size: float, shown: str) -> None:
    assert show_bytes(size) == shown


def test_a_model_is_shown_with_its_count() -> None:
    assert describe_model("llama3 debug", 1_255_040) == "llama3 debug (1.3M parameters)"
    assert describe_model("llama3 debug", 1_255_040, 1_255_040) == "llama3 debug (1.3M parameters)"
    assert describe_model("qwen3_moe 30b", 30_532_122_624, 3_345_000_000) == "qwen3_moe 30b (30.5B parameters, 3.3B active)"
