"""Initial weights: the generator is Philox, and any shard equals its part of the whole bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from titan_core.api import Computed, Constant, Elements, InitialValue, Normal, Ref, TruncatedNormal, Uniform, UserError
from titan_core.model import random_values
from titan_core.model.random_values import fill, philox_words


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


def of_position(elements: Elements, factor: float) -> Tensor:
    """A value that depends on the index along each dimension, and on two random numbers."""
    first, second = elements.uniform(), elements.uniform()
    place = torch.stack([index / size for index, size in zip(elements.index, elements.shape, strict=True)]).sum(0)
    return factor * place + torch.sqrt(-2.0 * first.log()) * torch.cos(math.tau * second)


COMPUTED = Computed(Ref(f"{__name__}:of_position"), {"factor": 3.0})


@settings(max_examples=200)
@given(
    boxes(),
    st.sampled_from([Normal(0.02), TruncatedNormal(1.0, 2.0), Uniform(-1, 3), COMPUTED]),
    st.sampled_from([3, 16, 1 << 20]),
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


def test_computed_values_are_those_of_the_formula() -> None:
    """The numbers of ``uniform`` are independent, of each other and of the indices."""
    shape = (400, 501)
    noise = whole(COMPUTED, shape)
    rows, columns = torch.meshgrid(torch.arange(400) / 400, torch.arange(501) / 501, indexing="ij")
    noise = noise - 3.0 * (rows + columns)
    assert abs(noise.mean()) < 0.01 and noise.std() == pytest.approx(1.0, rel=1e-2)
    assert (noise**4).mean() == pytest.approx(3.0, rel=3e-2)
    assert abs(torch.corrcoef(torch.stack([noise.flatten()[:-1], noise.flatten()[1:]]))[0, 1]) < 0.01
    scalar = whole(Computed(Ref(f"{__name__}:uniform")), ())
    assert torch.equal(scalar, whole(Uniform(0.0, 1.0), ()))
    assert torch.equal(whole(Computed(Ref(f"{__name__}:uniform")), (7, 3)), whole(Uniform(0.0, 1.0), (7, 3)))


def uniform(elements: Elements) -> Tensor:
    return elements.uniform()


def centred(elements: Elements) -> Tensor:
    values = elements.uniform()
    return values - values.mean()


def counted(elements: Elements) -> Tensor:
    return torch.ones_like(elements.uniform()).cumsum(0)


def scaled(elements: Elements) -> Tensor:
    """Values of which the guard of a plugin's results says that a single one is not finite."""
    values = elements.uniform()
    values = (values - values.mean()) / values.std()
    if not values.isfinite().all():
        raise UserError.one("plugin 'x'", "returned values that are not finite", "fix or update x")
    return values


def too_few(elements: Elements) -> Tensor:
    return elements.uniform()[:-1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (centred, "depend on which elements are computed together, and so on the mesh"),
        (counted, "depend on which elements are computed together, and so on the mesh"),
        (scaled, "computes 15 elements, and not 1 of them alone; it depends on .* computed together, and so on the mesh"),
        (too_few, r"returned \[14\] on cpu for 15 elements on cpu; it must return one value for each"),
    ],
)
def test_values_that_would_depend_on_the_mesh_are_refused(function: object, message: str) -> None:
    name = function.__name__  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=f"the initial value of parameter 'w': .*:{name} .*{message}"):
        whole(Computed(Ref(f"{__name__}:{name}")), (3, 5))


def test_a_function_sees_only_the_elements_of_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_values, "_CHUNK", 8)
    SEEN.clear()
    value = Computed(Ref(f"{__name__}:seen"))
    fill(torch.empty(2, 3), value, seed=0, name="w", global_shape=(4, 9), offset=(1, 6))
    assert {place for places in SEEN for place in places} == {(row, column) for row in (1, 2) for column in (6, 7, 8)}
    assert max(map(len, SEEN)) <= 8


SEEN: list[list[tuple[int, int]]] = []


def seen(elements: Elements) -> Tensor:
    rows, columns = elements.index
    SEEN.append(list(zip(rows.tolist(), columns.tolist(), strict=True)))
    return rows.float()
