"""Products of experts in float8 and MXFP8: against operands that are rounded by hand, in groups, and by the kernel's
arrangement of rows and scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from titan_float8.float8 import Float8GroupedLinear
from titan_float8.grouped import FilledRows, LowPrecisionGroupedLinear
from titan_float8.grouped_mx import MXGroupedLinear

COUNTS = torch.tensor([3, 0, 17, 1])
TAIL = 2
OUT, IN = 96, 64


def in_float8(row: Tensor) -> Tensor:
    """Return a row as the numbers that e4m3 has at its scale: the largest power of two that does not overflow."""
    scale = 2.0 ** math.floor(math.log2(448 / max(float(row.abs().max()), 1e-12)))
    return (row * scale).to(torch.float8_e4m3fn).float() / scale


def in_mxfp8(row: Tensor) -> Tensor:
    """Return a row as OCP's MX format does, with e4m3 and the smallest power of two per block at which none overflows."""
    results = []
    for block in row.split(32):
        largest = float(block.abs().max())
        exponent = -127 if largest == 0 else math.ceil(math.log2(largest / 448))
        results.append((block * 2.0**-exponent).to(torch.float8_e4m3fn).float() * 2.0**exponent)
    return torch.cat(results)


@dataclass(frozen=True)
class Format:
    product: type[LowPrecisionGroupedLinear]
    in_format: Callable[[Tensor], Tensor]

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with each row, along the last dimension, rounded."""
        rows = tensor.float().reshape(-1, tensor.shape[-1])
        return torch.stack([self.in_format(row) for row in rows]).view(tensor.shape)


FORMATS = {"float8": Format(Float8GroupedLinear, in_float8), "mxfp8": Format(MXGroupedLinear, in_mxfp8)}


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def by_hand(form: Format, rows: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the product and the gradients of both operands, expert by expert."""
    output, to_rows, to_weight = torch.zeros(len(rows), OUT), torch.zeros(len(rows), IN), torch.zeros(4, OUT, IN)
    start = 0
    for expert, count in enumerate(COUNTS.tolist()):
        if not count:
            continue
        its, one = slice(start, start + count), weight[expert]
        output[its] = form.rounded(rows[its]) @ form.rounded(one).T
        to_rows[its] = form.rounded(gradient[its]) @ form.rounded(one.T).T
        to_weight[expert] = gradient[its].T @ rows[its]
        start += count
    return output, to_rows, to_weight


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, gradients and weights, of which rows and blocks of features have different magnitudes."""
    generator = torch.Generator().manual_seed(0)
    size = int(COUNTS.sum()) + TAIL

    def magnitudes(length: int, features: int) -> Tensor:
        blocks = torch.exp(2 * torch.randn(length, features // 32, generator=generator)).repeat_interleave(32, 1)
        return blocks * torch.exp(3 * torch.randn(length, 1, generator=generator))

    rows = torch.randn(size, IN, generator=generator) * magnitudes(size, IN)
    weight = torch.randn(4, OUT, IN, generator=generator) * 0.1 * magnitudes(OUT, IN) ** 0.5
    gradient = torch.randn(size, OUT, generator=generator) * 1e-3 * magnitudes(size, OUT)
    rows[0, :32] = 0  # a block of zeros
    return rows.to(dtype), weight.to(dtype), gradient.to(dtype)


def computed(
    form: Format, rows: Tensor, weight: Tensor, gradient: Tensor, *, emulate: bool = True, masked: bool = True
) -> list[Tensor]:
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    output = form.product(emulate)(rows, weight, COUNTS, masked=masked)
    output.backward(gradient)
    assert rows.grad is not None and weight.grad is not None
    return [output.detach(), rows.grad, weight.grad]


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
def test_the_product_and_its_gradients_are_those_of_operands_rounded_by_hand(
    form: Format, dtype: torch.dtype, limit: float
) -> None:
    rows, weight, gradient = operands(dtype)
    expected = by_hand(form, rows.float(), weight.float(), gradient.float())
    exact = rows[:3].float() @ weight[0].float().T
    assert far(expected[0][:3], exact) > 0.01  # it does round
    for found, reference in zip(computed(form, rows, weight, gradient), expected, strict=True):
        assert found.dtype == dtype
        assert far(found, reference) <= limit


def test_rows_of_no_expert_have_no_effect_and_no_gradient(form: Format) -> None:
    rows, weight, gradient = operands()
    clean = computed(form, rows, weight, gradient)
    rows[-TAIL:], gradient[-TAIL:] = torch.tensor([[torch.nan], [torch.inf]]), torch.nan
    for found, expected in zip(computed(form, rows, weight, gradient), clean, strict=True):
        assert torch.equal(found, expected)
    output, to_rows, to_weight = clean
    assert output[-TAIL:].count_nonzero() == to_rows[-TAIL:].count_nonzero() == to_weight[1].count_nonzero() == 0
    # Without masks, only rows without an expert may differ.
    for found, expected in zip(computed(form, rows, weight, gradient, masked=False)[:2], clean, strict=False):
        assert torch.equal(found[:-TAIL], expected[:-TAIL])


def test_a_row_does_not_depend_on_the_others_nor_an_expert_on_the_others(form: Format) -> None:
    rows, weight, gradient = operands()
    whole = computed(form, rows, weight, gradient)
    part = form.product(True)(rows[3:20], weight[2:3], COUNTS[2:3])
    torch.testing.assert_close(part, whole[0][3:20], rtol=1e-6, atol=1e-6)


def test_parts_of_the_contracted_features_add_up() -> None:
    """As under tensor parallelism, which divides them between ranks and must not cut through a block."""
    rows, weight, _ = operands()
    product = MXGroupedLinear(True)
    parts = [product(rows[:, its], weight[:, :, its], COUNTS) for its in (slice(0, 32), slice(32, 64))]
    torch.testing.assert_close(parts[0] + parts[1], product(rows, weight, COUNTS), rtol=1e-5, atol=1e-5)


def test_weights_without_gradients_and_no_rows(form: Format) -> None:
    rows, weight, _ = operands()
    rows.requires_grad_()
    form.product(True)(rows, weight, COUNTS).sum().backward()
    assert rows.grad is not None and weight.grad is None
    weight.requires_grad_()
    form.product(True)(rows[:0], weight, torch.zeros_like(COUNTS)).sum().backward()
    assert weight.grad is not None and weight.grad.count_nonzero() == 0


@pytest.mark.full
@pytest.mark.skipif(Version(torch.__version__) < Version("2.15"), reason="before, the CPU has no grouped product: a loop")
@pytest.mark.parametrize("masked", [True, False])
def test_one_graph_computes_the_product_and_its_gradients(form: Format, masked: bool) -> None:
    rows, weight, gradient = operands()
    compiled = torch.compile(form.product(True), fullgraph=True, backend="aot_eager")
    results = []
    for product in (compiled, form.product(True)):
        leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        output = product(*leaves, COUNTS, masked=masked)
        results.append([output[:-TAIL], *torch.autograd.grad(output, leaves, gradient)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found[:21], expected[:21], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("counts", [[3, 0, 17, 1], [16, 32], [0, 0, 0], [1] * 7], ids=str)
@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("multiple", [16, 128])
def test_groups_are_filled_up_to_multiples(counts: list[int], tail: int, multiple: int) -> None:
    rows = sum(counts) + tail
    filled = FilledRows(torch.tensor(counts), rows, multiple)
    expected, start = [], 0
    for count, end in zip(counts, filled.ends.tolist(), strict=True):
        assert end % multiple == 0 and end - start - count in range(multiple)
        expected += range(start, start + count)
        start = end
    expected += range(start, start + tail)
    assert filled.places.tolist() == expected
    assert filled.ends.dtype == torch.int32
    assert filled.size % multiple == 0 and max(expected, default=-1) < filled.size < rows + multiple * (len(counts) + 1)
    tensor = torch.arange(1, rows + 1)
    assert torch.equal(filled.fill(tensor)[filled.places], tensor)
    assert int(filled.fill(tensor).sum()) == int(tensor.sum())


def multiplied_as_the_kernel_does(
    rows: Tensor, weight: Tensor, row_scales: Any, row_recipe: Any, weight_scales: Any, weight_recipe: Any, *, offs: Tensor,
    output_dtype: torch.dtype, swizzle_a: Any = None, swizzle_b: Any = None,
) -> Tensor:  # fmt: skip
    """Do what ``scaled_grouped_mm`` does on a GPU, and refuse what it would."""
    assert rows.dtype == weight.dtype == torch.float8_e4m3fn and output_dtype == torch.bfloat16
    assert rows.is_contiguous() and weight.mT.is_contiguous() and offs.dtype == torch.int32
    assert row_recipe == weight_recipe and offs.shape == weight.shape[:1]
    shapes = [one.to("meta") for one in (rows, weight, row_scales, weight_scales, offs)]
    torch._scaled_grouped_mm(*shapes)  # torch's own checks
    if row_recipe == F.ScalingType.RowWise:
        assert row_scales.shape == rows.shape[:1] and weight_scales.shape == (weight.shape[0], weight.shape[2])
        assert row_scales.dtype == weight_scales.dtype == torch.float32
        multiple, exact_rows = 16, rows.float() * row_scales[:, None]
        exact_weight = weight.float() * weight_scales[:, None]
    else:
        assert row_recipe == F.ScalingType.BlockWise1x32
        assert swizzle_a == swizzle_b == F.SwizzleType.SWIZZLE_32_4_4
        assert row_scales.dtype == weight_scales.dtype == torch.float8_e8m0fnu
        assert row_scales.dim() == 2 and row_scales.shape[0] >= rows.shape[0]
        multiple = 128  # the scales of each expert start at a block
        exact_rows = rows.float() * of_blocks(row_scales, *rows.shape)
        scales = [of_blocks(one, weight.shape[2], weight.shape[1]).T for one in weight_scales]
        exact_weight = weight.float() * torch.stack(scales)
    result, start = torch.full((rows.shape[0], weight.shape[2]), torch.nan, dtype=output_dtype), 0
    for expert, end in enumerate(offs.tolist()):
        assert (end - start) % multiple == 0 and end <= rows.shape[0]
        result[start:end] = (exact_rows[start:end] @ exact_weight[expert]).to(output_dtype)
        start = end
    return result


def of_blocks(arranged: Tensor, rows: int, features: int) -> Tensor:
    """Return the scale of each number, of scales in the order of cuBLAS's "1D block scaling factors layout": tiles of 128
    rows x 4 blocks, one after another along the features; in a tile, the four blocks of rows 0, 32, 64, 96, 1, 33 ..."""
    flat, tiles = arranged.float().flatten(), -(-features // 128)
    assert flat.numel() == -(-rows // 128) * tiles * 512
    row, block = torch.arange(rows)[:, None], torch.arange(features)[None] // 32
    tile = row // 128 * tiles + block // 4
    return flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]


def test_the_kernel_gets_what_is_emulated(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_grouped_mm", multiplied_as_the_kernel_does)
    given = operands(torch.bfloat16)
    for found, expected in zip(computed(form, *given, emulate=False), computed(form, *given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
    assert computed(form, *given, emulate=False)[0][-TAIL:].count_nonzero() == 0
