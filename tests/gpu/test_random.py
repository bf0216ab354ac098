"""What Titan draws at random on a GPU is what it draws on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.masks import DIVIDED, DROPPING
from harness.on_device import relative_error
from harness.small_gpt import job_of, small
from titan_core.api import Batch, Dropout, InitialValue, Microbatch, Normal, TruncatedNormal, Uniform
from titan_core.api.parallel.microbatch import microbatch_scope
from titan_core.model.random_values import fill, philox
from titan_testing.jobs import RunRecord, run_job

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")


def test_random_words_are_the_same_bits(device: torch.device) -> None:
    counters = torch.cat((torch.arange(5000), torch.arange(5000) + 2**34))
    assert torch.equal(philox(counters.to(device), key=2**63 + 17).cpu(), philox(counters, key=2**63 + 17))


def filled(device: torch.device, value: InitialValue) -> Tensor:
    tensor = torch.empty(300, 257, device=device)
    fill(tensor, value, seed=5, name="w", global_shape=tensor.shape, offset=(0, 0))
    return tensor.cpu()


def test_uniform_initial_values_are_the_same_bits(device: torch.device) -> None:
    assert torch.equal(filled(device, Uniform(-1.0, 3.0)), filled(CPU, Uniform(-1.0, 3.0)))


@pytest.mark.parametrize("value", [Normal(0.02), TruncatedNormal(1.0, 2.0)], ids=["normal", "truncated"])
def test_normal_initial_values_are_the_same_to_rounding(device: torch.device, value: InitialValue) -> None:
    """``torch.erfinv`` rounds differently on a GPU and on a CPU. One unit in the last place is 1.2e-7; near 0 and in the
    tails it may be several."""
    found, expected = filled(device, value), filled(CPU, value)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-9)
    assert relative_error(found, expected) < 3e-7


def dropped(device: torch.device, dtype: torch.dtype, compiled: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of dropout on the second half of a batch."""
    module = Dropout(0.3)
    module.begin("blocks.3.dropout", device)
    hidden = torch.linspace(1, 2, 2 * 33 * 70).view(2, 33, 70).to(device, dtype).requires_grad_()
    tokens = torch.zeros(2, 33, dtype=torch.int64, device=device)
    batch = Batch(tokens, tokens, rows=torch.tensor([2, 3], device=device))
    call = torch.compile(module) if compiled else module
    with microbatch_scope(Microbatch(batch, step=7, seed=3)):
        output = call(hidden)
        output.float().sum().backward()
    assert hidden.grad is not None
    return output.detach().cpu(), hidden.grad.cpu()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dropout_draws_the_same_bits(device: torch.device, dtype: torch.dtype, compiled: bool) -> None:
    if compiled and device.type == "cpu":
        # tests/core/test_random_streams.py compiles the same module for the CPU.
        pytest.skip("the compiled rows test the code that Inductor generates for a GPU, and this run is on the CPU")
    for found, expected in zip(dropped(device, dtype, compiled), dropped(CPU, dtype, False), strict=True):
        assert torch.equal(found, expected)
        assert 0.25 < float((expected == 0).float().mean()) < 0.35


def test_a_model_with_dropout_learns_as_on_the_cpu(device: torch.device, in_tmp: Path) -> None:
    """Any other mask would change the losses in the third digit."""

    def run(kind: str, recompute: str = "none") -> RunRecord:
        settings = {**DIVIDED, "job.device": kind, "activation_checkpoint.mode": recompute}
        return run_job(job_of(small(**DROPPING), settings, 1))

    expected = run("cpu").losses
    assert run(device.type).losses == pytest.approx(expected, rel=1e-5)
    assert run(device.type, "full").losses == pytest.approx(expected, rel=1e-5)
