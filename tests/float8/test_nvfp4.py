"""NVFP4: numbers are torchao's bit by bit, gradients are rounded without bias, and the kernel gets what is emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
from torchao.prototype.mx_formats.utils import from_blocked

from titan_core.api import UserError
from titan_float8 import nvfp4
from titan_float8.config import MXSection
from titan_float8.nvfp4 import BLOCK, NVFP4Linear, hadamard, multiply, quantize, spread
from titan_testing.jobs import make_job


def numbers(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    """Return numbers whose magnitudes differ by row and by block."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(shape[0], shape[1] // BLOCK, 1, generator=generator))
    return (torch.randn(shape[0], shape[1] // BLOCK, BLOCK, generator=generator) * sizes).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 3e4])
def test_rows_are_those_of_torchao(size: float, dtype: torch.dtype) -> None:
    matrix = (numbers(48, 96) * size).to(dtype)
    matrix[3, 16:32] = 0
    found = quantize(matrix)
    scales, packed = nvfp4_quantize(matrix, BLOCK, found.scale)
    assert torch.equal(found.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(found.values, f4_unpacked_to_f32(unpack_uint4(packed)))
    exact = NVFP4Tensor(packed, scales, BLOCK, dtype, found.scale).dequantize(torch.float32)
    assert torch.equal(found.exact(torch.float32), exact)
    assert torch.equal(found.exact(torch.bfloat16).float(), exact)  # bf16 rounds none
    theirs = float(per_tensor_amax_to_scale(matrix.abs().max()))
    assert theirs <= float(found.scale) < 2 * theirs and float(found.scale.log2()) % 1 == 0


def test_blocks_of_weights_are_square_and_those_of_torchao() -> None:
    """If all rows of a block have its largest number, each row's scale is the block's."""
    matrix = numbers(64, 96, spread=0.0)
    blocks = matrix.view(4, BLOCK, 6, BLOCK)
    blocks[..., 0] = blocks.abs().amax((1, 3))[:, None]
    found = quantize(matrix, BLOCK)
    scales, packed = nvfp4_quantize(matrix, BLOCK, found.scale)
    assert torch.equal(found.scales.repeat_interleave(BLOCK, 0).view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(found.values, f4_unpacked_to_f32(unpack_uint4(packed)))
    other = numbers(64, 96)
    assert torch.equal(
        quantize(other, BLOCK).mT.exact(torch.float32), quantize(other.mT.contiguous(), BLOCK).exact(torch.float32)
    )


def test_other_rows_change_no_number() -> None:
    """So no rank depends on the tokens of others."""
    matrix = numbers(32, 64, spread=0.5)
    large = torch.cat((matrix, matrix * 100))
    assert torch.equal(quantize(large).exact(torch.float32)[:32], quantize(matrix).exact(torch.float32))


def test_nothing_that_is_not_finite_vanishes() -> None:
    for value in (float("nan"), float("inf")):
        matrix = torch.ones(16, 32)
        matrix[2, 3] = value
        assert not quantize(matrix).exact(torch.float32).isfinite().all()
    assert not quantize(torch.zeros(16, 32)).exact(torch.float32).any()


def test_stochastic_rounding_has_no_bias_and_chooses_neighbours() -> None:
    matrix = numbers(16, 64, spread=0.7)
    nearest = quantize(matrix)
    exact = matrix.view(16, 4, BLOCK) / (nearest.scales.float() * nearest.scale)[..., None]
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    mean = torch.zeros(16, 64)
    for one in range(0, 2**15, 128):
        found = quantize(matrix, bits=torch.full((16, 64), one, dtype=torch.int32))
        assert torch.isin(found.values.abs(), grid).all()
        assert ((found.values - exact.flatten(1)).abs() <= 2.0).all()
        mean += found.values / 256
    inside = exact.flatten(1).abs() <= 6.0  # scales of blocks are rounded, so the largest number may exceed the grid
    torch.testing.assert_close(mean[inside], exact.flatten(1)[inside], atol=2.0 / 256 + 1e-5, rtol=0.0)


def test_the_transform_is_that_of_torchao_and_cancels() -> None:
    signs = tuple(1 - 2 * (nvfp4._SIGNS >> row & 1) for row in range(BLOCK))
    cpu = torch.device("cpu")
    assert torch.equal(hadamard(cpu, torch.bfloat16), get_rht_matrix(signs, "cpu", torch.bfloat16, BLOCK))
    assert set(signs) == {1, -1}
    left, right = torch.randn(2, 48, 8), torch.randn(2, 48, 24)
    expected = left.flatten(0, 1).mT @ right.flatten(0, 1)
    torch.testing.assert_close(spread(left) @ spread(right).mT, expected, atol=1e-4, rtol=1e-4)
    assert spread(left).shape == (8, 2 * 64)  # filled up for the kernel


def test_an_outlier_is_spread_over_its_block() -> None:
    tokens = torch.zeros(1, 32, 4)
    tokens[0, 5, 0] = 16.0
    assert torch.equal(spread(tokens)[0].abs(), torch.tensor([4.0] * 16 + [0.0] * 16))


def layer_of(recipe: str = "nvfp4", emulate: bool = True) -> NVFP4Linear:
    torch.manual_seed(0)
    section = MXSection(recipe_name=recipe, emulate=emulate)  # type: ignore[arg-type]
    return NVFP4Linear.from_linear(nn.Linear(64, 96, bias=True), section)


@pytest.mark.parametrize(("recipe", "error"), [("nvfp4", (0.08, 0.2)), ("nvfp4_wgrad_with_hp", (0.0, 1e-6))])
def test_products_have_the_error_of_4_bits(recipe: str, error: tuple[float, float]) -> None:
    layer, x = layer_of(recipe), torch.randn(2, 64, 64, requires_grad=True)
    y = layer(x)
    gradient = torch.randn(y.shape) * 1e-4
    y.backward(gradient)
    expected = F.linear(x, layer.weight, layer.bias)
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    of_weight = gradient.flatten(0, 1).mT @ x.detach().flatten(0, 1)
    for found, exact, (least, most) in (
        (y, expected, (0.08, 0.2)), (x.grad, gradient @ layer.weight, (0.08, 0.2)), (layer.weight.grad, of_weight, error)
    ):  # fmt: skip
        assert least <= float((found - exact).detach().norm() / exact.detach().norm()) <= most
    torch.testing.assert_close(layer.bias.grad, gradient.sum((0, 1)))


def test_the_kernel_gets_the_numbers_that_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, with scales in the order of tiles: unpacked again, they give the emulated product."""
    calls: list[tuple[Any, ...]] = []

    def scaled_mm(low: Tensor, other: Tensor, scales: Any, kinds: Any, others: Any, *rest: Any, **options: Any) -> Tensor:
        calls.append((kinds, *rest, options))
        both = []
        for packed, (of_blocks, whole) in ((low, scales), (other.mT, others)):
            assert packed.is_contiguous() and packed.shape[-1] % 16 == 0  # 16 bytes a row
            values = f4_unpacked_to_f32(unpack_uint4(packed.view(torch.uint8)))
            plain = from_blocked(of_blocks.view(torch.uint8), len(values), values.shape[1] // BLOCK).view(
                torch.float8_e4m3fn
            )
            both.append((values.unflatten(1, (-1, BLOCK)) * (plain.float() * whole)[..., None]).flatten(1))
        return (both[0] @ both[1].mT).bfloat16()

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    x = torch.randn(2, 40, 64).bfloat16()  # 40 positions are filled up to 64
    results = []
    for emulate in (False, True):
        layer, mine = layer_of(emulate=emulate).bfloat16(), x.clone().requires_grad_()
        torch.manual_seed(1)  # outside a run, bits come from torch's generator
        y = layer(mine)
        y.backward(torch.ones_like(y) * 1e-3)
        results.append((y, mine.grad, layer.weight.grad))
    assert len(calls) == 3
    order = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    assert calls == [(kinds, kinds, order, order, {"output_dtype": torch.bfloat16})] * 3
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-2)


def test_square_blocks_and_rows_multiply() -> None:
    left, right = quantize(numbers(32, 64, seed=1)), quantize(numbers(48, 64, seed=2), BLOCK)
    expected = left.exact(torch.float64) @ right.exact(torch.float64).mT
    torch.testing.assert_close(multiply(left, right, torch.float64, True), expected)


def test_a_ring_cuts_no_block_of_tokens() -> None:
    settings = {"mx.enable": "true", "mx.emulate": "true", "mx.recipe_name": "nvfp4", "training.seq_len": 96}
    with pytest.raises(UserError, match=r"16 positions share a scale, and ranks hold chunks of 24; .* multiple of 64"):
        make_job("tiny", {**settings, "parallelism.context_parallel_degree": 2}, world_size=2)
    make_job("tiny", {**settings, "training.seq_len": 128, "parallelism.context_parallel_degree": 2}, world_size=2)
