"""Each recipe's three matmuls agree with fp64 within the rounding of the format, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from titan_float8.config import Float8Section, MXSection
from titan_float8.float8 import linear_config
from titan_float8.mx import BLOCK, MXLinear

E4M3, E5M2 = 2.0**-4, 2.0**-3
"""Half a unit in the last place, relative to the number, with 3 and 2 bits of mantissa."""
SMALLEST = 2.0**-10 / 224
"""Error of a subnormal number, relative to the largest number with the same scale: half of the smallest number, divided by
the least value to which the largest is scaled."""
EXACT = 1e-5


@dataclass(frozen=True)
class Recipe:
    """Relative rounding errors of the inputs of each matmul."""

    forward: tuple[float, float]
    to_input: tuple[float, float]
    to_weight: tuple[float, float]


RECIPES = {
    "tensorwise": Recipe((E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3)),
    "rowwise": Recipe((E4M3, E4M3), (E4M3, E4M3), (E4M3, E4M3)),
    "rowwise_with_gw_hp": Recipe((E4M3, E4M3), (E4M3, E4M3), (0.0, 0.0)),
    "mxfp8_rceil": Recipe((E4M3, E4M3), (E4M3, E4M3), (E4M3, E4M3)),
    # Scales are rounded down, so a block's largest number may exceed the format's: 512 instead of 448.
    "mxfp8_floor": Recipe((2.0**-3, 2.0**-3), (2.0**-3, 2.0**-3), (2.0**-3, 2.0**-3)),
    "mxfp8_rceil_wgrad_with_hp": Recipe((E4M3, E4M3), (E4M3, E4M3), (0.0, 0.0)),
}


def converted(layer: nn.Linear, recipe: str) -> nn.Module:
    if recipe.startswith("mx"):
        return MXLinear.from_linear(layer, MXSection(recipe_name=recipe, emulate=True))  # type: ignore[arg-type]
    from torchao.float8 import convert_to_float8_training

    section = Float8Section(recipe_name=recipe, emulate=True)  # type: ignore[arg-type]
    return convert_to_float8_training(nn.Sequential(layer), config=linear_config(section, gather=False))[0]


def allowed(left: Tensor, right: Tensor, errors: tuple[float, float]) -> Tensor:
    """Return the error of ``left @ right`` if each of their numbers has the rounding error of its format."""
    a, b = (
        abs(matrix) * error + (float(matrix.detach().abs().max()) * SMALLEST if error else 0.0)
        for matrix, error in zip((left, right), errors, strict=True)
    )
    exact = left.abs() @ right.abs()
    return a @ right.abs() + left.abs() @ b + a @ b + EXACT * exact


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_errors_stay_within_the_rounding_of_the_format(recipe: str, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        """Return normal numbers, whose magnitudes differ between rows if ``spread`` is above 0."""
        rows = torch.exp(spread * torch.randn(shape[0], 1, generator=generator))
        return torch.randn(*shape, generator=generator) * rows

    x, weight, gradient = numbers(2 * BLOCK, 128), numbers(96, 128) * 0.05, numbers(2 * BLOCK, 96) * 1e-3
    layer = nn.Linear(128, 96, bias=False)
    layer.weight.data.copy_(weight)
    module = converted(layer, recipe)
    x.requires_grad_()
    y = module(x)
    y.backward(gradient)
    assert x.grad is not None and layer.weight.grad is not None
    x64, w64, g64 = (matrix.detach().double() for matrix in (x, weight, gradient))
    errors = RECIPES[recipe]
    for name, got, left, right, relative in (
        ("output", y, x64, w64.t(), errors.forward),
        ("gradient of the input", x.grad, g64, w64, errors.to_input),
        ("gradient of the weight", layer.weight.grad, g64.t(), x64, errors.to_weight),
    ):
        error = (got.double() - left @ right).abs()
        assert (error <= allowed(left, right, relative)).all(), name
        typical = float(error.detach().norm() / (left @ right).norm())
        if any(relative):  # the recipe does compute in low precision
            assert 0.005 < typical < 0.12, (name, typical)
        else:
            assert typical < 1e-5, (name, typical)


def test_scales_per_row_preserve_small_rows() -> None:
    """With one scale per row, one large row costs the others no precision."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 128, generator=generator)
    x[0] *= 1e5
    layer = nn.Linear(128, 96, bias=False)
    exact = layer(x)
    errors = {
        recipe: float(((converted(layer, recipe)(x) - exact)[1:].norm() / exact[1:].norm()).detach())
        for recipe in ("tensorwise", "rowwise", "mxfp8_rceil")
    }
    assert errors["rowwise"] < 0.05
    assert errors["mxfp8_rceil"] < 0.05
    assert errors["tensorwise"] > 0.15
