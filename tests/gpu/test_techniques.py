"""Techniques that must not change what a run computes: on one GPU, each trains as the plain run does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.on_device import BF16, relative_error, train_on
from titan_testing.jobs import RunRecord

pytestmark = pytest.mark.gpu

AC = "activation_checkpoint.mode"
COMPILE: dict[str, object] = {"compile.enable": "true"}
EXACT: dict[str, object] = {"training.deterministic": "true"}
"""The same kernels in the same order give the same bits only if none of them uses atomic additions."""


def same_bits(found: RunRecord, expected: RunRecord) -> None:
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    for name, tensor in expected.final.items():
        assert torch.equal(found.final[name], tensor), name


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "mode",
    [
        {AC: "full"},
        {AC: "selective"},
        {AC: "selective", "activation_checkpoint.selective_ac_option": "2"},
        {AC: "full", "data.document_mask": "true"},
        {AC: "selective", "data.document_mask": "true"},
    ],
    ids=lambda mode: ", ".join(map(str, mode.values())),
)
def test_recomputation_gives_the_same_bits(
    device: torch.device, in_tmp: Path, mode: dict[str, object], precision: dict[str, object]
) -> None:
    base = {key: value for key, value in mode.items() if not key.startswith("activation_checkpoint")}
    same_bits(train_on(device, {**EXACT, **precision, **mode}), train_on(device, {**EXACT, **precision, **base}))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_offloading_gives_the_same_bits(device: torch.device, in_tmp: Path, mode: str, share: float) -> None:
    settings = {**EXACT, **BF16, AC: mode}
    offloading = train_on(device, {**settings, "activation_checkpoint.offload_share": share})
    same_bits(offloading, train_on(device, settings))


def compiled_for(device: torch.device) -> dict[str, object]:
    """Inductor on a GPU. On the CPU the test checks only itself, with a backend that needs no C++ compiler."""
    return {**COMPILE, "compile.backend": "inductor" if device.type == "cuda" else "aot_eager"}


@pytest.mark.parametrize(
    ("overrides", "loss_tolerance", "gradient_tolerance"),
    # Compiled code computes the same in fp32, in another order. In bf16 it rounds less often than eager code does.
    [
        ({}, 1e-5, 1e-4),
        ({AC: "selective"}, 1e-5, 1e-4),
        ({AC: "full"}, 1e-5, 1e-4),
        ({"data.document_mask": "true"}, 1e-5, 1e-4),
        (BF16, 4e-3, 3e-2),
    ],
    ids=["fp32", "selective", "full", "documents", "bf16"],
)
def test_compiled_code_trains_as_eager_code(
    device: torch.device, in_tmp: Path, overrides: dict[str, object], loss_tolerance: float, gradient_tolerance: float
) -> None:
    compiled, eager = train_on(device, {**overrides, **compiled_for(device)}), train_on(device, overrides)
    assert compiled.losses == pytest.approx(eager.losses, rel=loss_tolerance)
    for name, tensor in eager.gradients.items():
        assert relative_error(compiled.gradients[name], tensor) < gradient_tolerance, f"gradient {name}"


@pytest.mark.parametrize("overrides", [{}, {AC: "selective"}, {"compile.enable": "true"}], ids=str)
def test_variable_length_attention_trains_as_a_mask(
    device: torch.device, in_tmp: Path, overrides: dict[str, object]
) -> None:
    masked = {**BF16, "data.document_mask": "true"}
    more = {**overrides, **(compiled_for(device) if "compile.enable" in overrides else {})}
    found, expected = train_on(device, {**masked, **more, "data.document_attention": "varlen"}), train_on(device, masked)
    assert found.losses == pytest.approx(expected.losses, rel=4e-3)
    for name, tensor in expected.gradients.items():
        assert relative_error(found.gradients[name], tensor) < 3e-2, f"gradient {name}"


def test_a_memory_budget_trains_as_eager_code(cuda: torch.device, in_tmp: Path) -> None:
    budget = {**COMPILE, AC: "memory_budget", "activation_checkpoint.memory_budget": 0.5}
    assert train_on(cuda, budget).losses == pytest.approx(train_on(cuda).losses, rel=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        {"objective.chunk_tokens": 32},
        {"objective.chunk_tokens": 48},  # does not divide the sequence
        {"training.local_batch_size": 1},
        {"training.enable_cpu_offload": "true"},
        {"parallelism.fsdp_reshard_after_forward": "always"},
        {"optimizer.implementation": "foreach"},
        {"optimizer.implementation": "for-loop"},
        {"validation.enable": "true", "validation.dataset": "stdlib", "validation.freq": 2, "validation.steps": 1},
    ],
    ids=lambda overrides: " ".join(f"{key}={value}" for key, value in overrides.items()),
)
def test_switches_change_nothing_but_rounding(device: torch.device, in_tmp: Path, overrides: dict[str, object]) -> None:
    found, plain = train_on(device, overrides), train_on(device)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(plain.grad_norms, rel=1e-4)
    for name, tensor in plain.gradients.items():
        assert relative_error(found.gradients[name], tensor) < 1e-5, f"gradient {name}"


FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def require_float8(device: torch.device) -> dict[str, object]:
    """Return the settings with which the device computes in float8."""
    if device.type == "cpu":
        return {"float8.emulate": "true"}
    if torch.cuda.get_device_capability(device) < (8, 9):
        # Older GPUs have no float8 matrix product. Emulation, which they would need, is tested on the CPU.
        pytest.skip(f"float8 needs compute capability 8.9, and this is a {torch.cuda.get_device_name(device)}")
    return {}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", FLOAT8_RECIPES)
def test_float8_learns_as_bf16_does(device: torch.device, in_tmp: Path, recipe: str, compiled: bool) -> None:
    """float8 has 3 bits of mantissa (6 % rounding error), which averages out over a layer's sums: the losses of the first
    steps stay within 2 %, as with emulation on the CPU (``tests/float8/test_training.py``)."""
    more = {**BF16, "training.steps": 8, **(compiled_for(device) if compiled else {})}
    float8 = {**require_float8(device), "float8.enable": "true", "float8.recipe_name": recipe}
    found, bf16 = train_on(device, {**more, **float8}), train_on(device, more)
    assert found.losses != bf16.losses
    assert found.losses == pytest.approx(bf16.losses, rel=0.02)


@pytest.mark.parametrize("recipe", FLOAT8_RECIPES)
def test_float8_layers_compute_what_torchao_computes(device: torch.device, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from titan_float8.config import Float8Section
    from titan_float8.float8 import linear_config
    from titan_testing.jobs import make_job

    emulate = bool(require_float8(device))
    section = make_job("tiny", {"float8.enable": "true", "float8.recipe_name": recipe}).config.section(Float8Section)
    ours = linear_config(section.model_copy(update={"emulate": emulate}), False)
    theirs = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(theirs, "emulate", emulate)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128, bias=False)).to(device, torch.bfloat16)
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    results: list[list[Any]] = []
    for config in (ours, theirs):
        layer = convert_to_float8_training(copy.deepcopy(plain), config=config)
        inputs = x.clone().requires_grad_()
        output = layer(inputs)
        output.float().square().mean().backward()
        results.append([output, inputs.grad, layer[0].weight.grad])
    exact = (x.float() @ plain[0].weight.float().T).detach()
    assert 1e-4 < relative_error(results[0][0].detach(), exact) < 0.06
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
