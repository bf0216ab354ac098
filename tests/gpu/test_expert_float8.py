"""Products of experts in float8 and MXFP8 on a GPU equal those that are emulated there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.on_device import relative_error
from titan_float8.float8 import Float8GroupedLinear
from titan_float8.grouped import LowPrecisionGroupedLinear
from titan_float8.hardware import FLOAT8_GROUPED, MXFP8_GROUPED

pytestmark = pytest.mark.gpu

COUNTS = [3, 0, 130, 16, 1]
TAIL, OUT, IN = 5, 192, 256


def product_of(name: str) -> type[LowPrecisionGroupedLinear]:
    if name == "float8":
        return Float8GroupedLinear
    from titan_float8.grouped_mx import MXGroupedLinear  # cannot be imported on all GPUs: see titan_float8.mx

    return MXGroupedLinear


@pytest.mark.parametrize(("name", "needed"), [("float8", FLOAT8_GROUPED), ("mxfp8", MXFP8_GROUPED)])
def test_the_kernel_computes_what_is_emulated(device: torch.device, name: str, needed: int) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != needed:
        pytest.skip(f"needs a GPU of compute capability {needed}.x")
    product = product_of(name)
    generator = torch.Generator().manual_seed(0)
    size = sum(COUNTS) + TAIL

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    rows, weight, gradient = numbers(size, IN), numbers(len(COUNTS), OUT, IN), numbers(size, OUT)
    rows[-TAIL:], gradient[-TAIL:] = torch.nan, torch.nan
    counts = torch.tensor(COUNTS, device=device)

    def computed(emulate: bool) -> list[Tensor]:
        leaves = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
        output = product(emulate)(*leaves, counts)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]

    for found, expected in zip(computed(False), computed(True), strict=True):
        assert relative_error(found, expected) < 5e-3  # both round their sums to bf16
    assert computed(False)[0][-TAIL:].count_nonzero() == 0
