"""Initial weights: the generator is Philox, and any shard equals its part of the whole bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from titan_core.api import Constant, InitialValue, Normal, TruncatedNormal, Uniform
from titan_core.model import random_values
from titan_core.model.philox import philox_words
from titan_core.model.random_values import fill


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with Random123 by the authors of Philox
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFF_FFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_returns_the_published_words(counter: tuple[int, ...], key: int, expected: tuple[int, ...]) -> None:
    words = philox_words(tuple(torch.tensor([word]) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def whole(value: InitialValue, shape: tuple[int, ...], name: str = "w", seed: int = 0) -> Tensor:
    tensor = torch.empty(shape)
    fill(tensor, value, seed=seed, name=name, global_shape=shape, offset=(0,) * len(shape))
    return tensor


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    local = tuple(draw(st.integers(0, size - first)) for size, first in zip(shape, offset, strict=True))
    return shape, offset, local


@settings(max_examples=200)
@given(
    boxes(), st.sampled_from([Normal(0.02), TruncatedNormal(1.0, 2.0), Uniform(-1, 3)]), st.sampled_from([3, 16, 1 << 20])
)
def test_any_shard_is_its_part_of_the_whole(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], value: InitialValue, chunk: int
) -> None:
    shape, offset, local = box
    expected = whole(value, shape)[tuple(slice(first, first + size) for first, size in zip(offset, local, strict=True))]
    shard = torch.full(local, math.nan)
    old, random_values._CHUNK = random_values._CHUNK, chunk
    try:
        fill(shard, value, seed=0, name="w", global_shape=shape, offset=offset)
    finally:
        random_values._CHUNK = old
    assert torch.equal(shard, expected)


def test_values_depend_on_seed_and_name() -> None:
    first = whole(Normal(1.0), (1000,))
    for other in (whole(Normal(1.0), (1000,), name="v"), whole(Normal(1.0), (1000,), seed=1)):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.15


def test_distributions() -> None:
    size = (1000, 1003)
    normal = whole(Normal(2.0), size)
    assert abs(normal.mean()) < 0.01
    assert normal.std() == pytest.approx(2.0, rel=5e-3)
    assert ((normal / 2) ** 4).mean() == pytest.approx(3.0, rel=2e-2)  # kurtosis: the tails are not cut off
    truncated = whole(TruncatedNormal(1.0, 2.0), size)
    assert truncated.abs().max() <= 2.0
    assert truncated.abs().max() > 1.99
    assert truncated.std() == pytest.approx(0.8796, rel=5e-3)
    uniform = whole(Uniform(-1.0, 3.0), size)
    assert (uniform.min() > -1.0, uniform.max() < 3.0) == (True, True)
    assert uniform.mean() == pytest.approx(1.0, abs=5e-3)
    assert torch.equal(whole(Constant(0.5), (3, 2)), torch.full((3, 2), 0.5))
    neighbours = torch.corrcoef(torch.stack([normal.flatten()[:-1], normal.flatten()[1:]]))[0, 1]
    assert abs(neighbours) < 5e-3


def test_low_precision_is_the_rounded_fp32_value() -> None:
    tensor = torch.empty(7, 5, dtype=torch.bfloat16)
    fill(tensor, Normal(1.0), seed=0, name="w", global_shape=(7, 5), offset=(0, 0))
    assert torch.equal(tensor, whole(Normal(1.0), (7, 5)).bfloat16())
