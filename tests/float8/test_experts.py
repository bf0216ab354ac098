"""Products of experts in float8: against operands that are rounded by hand, in groups, by the kernel's arrangement of rows,
and which experts are converted."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.jobs import make_job
from titan_core.api import Column, Experts, GroupedLinear, ModelLayout, ModelPart, Replicate, Router, Shard, UserError
from titan_core.model.next_token import NextToken
from titan_float8 import float8, float8_check, hardware, mx
from titan_float8.config import Float8Section, MXSection
from titan_float8.grouped import Float8GroupedLinear, padded_places

COUNTS = torch.tensor([3, 0, 17, 1])
TAIL = 2
OUT, IN = 48, 32


def rounded(tensor: Tensor) -> Tensor:
    """Return each row of ``tensor``, along the last dimension, as the numbers that e4m3 has at its scale."""
    rows = tensor.float().reshape(-1, tensor.shape[-1])
    results = []
    for row in rows:
        largest = float(row.abs().max())
        scale = 2.0 ** math.floor(math.log2(448 / max(largest, 1e-12)))
        results.append((row * scale).to(torch.float8_e4m3fn).float() / scale)
    return torch.stack(results).view(tensor.shape)


def by_hand(rows: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the product and the gradients of both operands, expert by expert."""
    output, to_rows, to_weight = torch.zeros(len(rows), OUT), torch.zeros(len(rows), IN), torch.zeros(4, OUT, IN)
    start = 0
    for expert, count in enumerate(COUNTS.tolist()):
        if not count:
            continue
        its, one = slice(start, start + count), weight[expert]
        output[its] = rounded(rows[its]) @ rounded(one).T
        to_rows[its] = rounded(gradient[its]) @ rounded(one.T).T
        to_weight[expert] = gradient[its].T @ rows[its]
        start += count
    return output, to_rows, to_weight


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows and gradients of different magnitudes, and weights."""
    generator = torch.Generator().manual_seed(0)
    size = int(COUNTS.sum()) + TAIL
    magnitudes = torch.exp(3 * torch.randn(size, 1, generator=generator))
    rows = torch.randn(size, IN, generator=generator) * magnitudes
    weight = torch.randn(4, OUT, IN, generator=generator) * 0.1
    gradient = torch.randn(size, OUT, generator=generator) * 1e-3
    return rows.to(dtype), weight.to(dtype), gradient.to(dtype)


def computed(rows: Tensor, weight: Tensor, gradient: Tensor, *, emulate: bool = True, masked: bool = True) -> list[Tensor]:
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    output = Float8GroupedLinear(emulate)(rows, weight, COUNTS, masked=masked)
    output.backward(gradient)
    assert rows.grad is not None and weight.grad is not None
    return [output.detach(), rows.grad, weight.grad]


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
def test_the_product_and_its_gradients_are_those_of_operands_rounded_by_hand(dtype: torch.dtype, limit: float) -> None:
    rows, weight, gradient = operands(dtype)
    expected = by_hand(rows.float(), weight.float(), gradient.float())
    exact = rows[:3].float() @ weight[0].float().T
    assert far(expected[0][:3], exact) > 0.01  # it does round
    for found, reference in zip(computed(rows, weight, gradient), expected, strict=True):
        assert found.dtype == dtype
        assert far(found, reference) <= limit


def test_rows_of_no_expert_have_no_effect_and_no_gradient() -> None:
    rows, weight, gradient = operands()
    clean = computed(rows, weight, gradient)
    rows[-TAIL:], gradient[-TAIL:] = torch.tensor([[torch.nan], [torch.inf]]), torch.nan
    for found, expected in zip(computed(rows, weight, gradient), clean, strict=True):
        assert torch.equal(found, expected)
    output, to_rows, to_weight = clean
    assert output[-TAIL:].count_nonzero() == to_rows[-TAIL:].count_nonzero() == to_weight[1].count_nonzero() == 0
    # Without masks, only rows without an expert may differ.
    for found, expected in zip(computed(rows, weight, gradient, masked=False)[:2], clean, strict=False):
        assert torch.equal(found[:-TAIL], expected[:-TAIL])


def test_a_row_does_not_depend_on_the_others_nor_an_expert_on_the_others() -> None:
    rows, weight, gradient = operands()
    whole = computed(rows, weight, gradient)
    product = Float8GroupedLinear(True)
    part = product(rows[3:20], weight[2:3], COUNTS[2:3])
    torch.testing.assert_close(part, whole[0][3:20], rtol=1e-6, atol=1e-6)


def test_weights_without_gradients_and_no_rows() -> None:
    rows, weight, _ = operands()
    rows.requires_grad_()
    Float8GroupedLinear(True)(rows, weight, COUNTS).sum().backward()
    assert rows.grad is not None and weight.grad is None
    weight.requires_grad_()
    Float8GroupedLinear(True)(rows[:0], weight, torch.zeros_like(COUNTS)).sum().backward()
    assert weight.grad is not None and weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("counts", [[3, 0, 17, 1], [16, 32], [0, 0, 0], [1] * 7], ids=str)
@pytest.mark.parametrize("tail", [0, 5])
def test_groups_are_filled_up_to_multiples_of_16(counts: list[int], tail: int) -> None:
    rows = sum(counts) + tail
    places, ends = padded_places(torch.tensor(counts), rows)
    expected, start = [], 0
    for count, end in zip(counts, ends.tolist(), strict=True):
        assert end % 16 == 0 and end - start - count in range(16)
        expected += range(start, start + count)
        start = end
    expected += range(start, start + tail)
    assert places.tolist() == expected
    assert ends.dtype == torch.int32 and max(expected, default=-1) < rows + 15 * len(counts)


def multiplied_as_the_kernel_does(
    rows: Tensor, weight: Tensor, row_scales: Any, row_recipe: Any, weight_scales: Any, weight_recipe: Any, *, offs: Tensor,
    output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Do what ``scaled_grouped_mm`` does on a GPU, and refuse what it would."""
    assert rows.dtype == weight.dtype == torch.float8_e4m3fn and output_dtype == torch.bfloat16
    assert rows.is_contiguous() and weight.mT.is_contiguous() and offs.dtype == torch.int32
    assert row_recipe == weight_recipe == F.ScalingType.RowWise
    assert row_scales.shape == rows.shape[:1] and weight_scales.shape == (weight.shape[0], weight.shape[2])
    assert row_scales.dtype == weight_scales.dtype == torch.float32
    result, start = torch.full((rows.shape[0], weight.shape[2]), torch.nan, dtype=output_dtype), 0
    for expert, end in enumerate(offs.tolist()):
        assert (end - start) % 16 == 0 and end <= rows.shape[0]
        its = rows[start:end].float() * row_scales[start:end, None]
        result[start:end] = (its @ (weight[expert].float() * weight_scales[expert])).to(output_dtype)
        start = end
    return result


def test_the_kernel_gets_what_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_grouped_mm", multiplied_as_the_kernel_does)
    given = operands(torch.bfloat16)
    for found, expected in zip(computed(*given, emulate=False), computed(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
    assert computed(*given, emulate=False)[0][-TAIL:].count_nonzero() == 0


class Stack(nn.Module):
    """Experts of one layer."""

    def __init__(self, out: int = 64, product: bool = True) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(4, out, 64))
        self.bias = nn.Parameter(torch.empty(4, out))
        if product:
            self.product = GroupedLinear()


def part_of(experts: nn.Module, exact: tuple[str, ...] = ()) -> ModelPart:
    layout = ModelLayout(
        num_blocks=1, dim=64, vocab_size=64, max_seq_len=8, embedding=("embed",), blocks="blocks", head=("head",),
        rules={"blocks.*.experts.*": Experts()}, routers={"blocks.*.router": Router(experts=4, per_token=2)}, exact=exact,
    )  # fmt: skip
    with torch.device("meta"):
        block = nn.ModuleDict(
            {"experts": experts, "router": nn.Linear(64, 4, bias=False), "wo": nn.Linear(64, 64, bias=False)}
        )
        module = nn.ModuleDict(
            {"embed": nn.Embedding(64, 64), "blocks": nn.ModuleDict({"0": block}), "head": nn.Linear(64, 64, bias=False)}
        )
    return ModelPart(module, layout, NextToken())


def section(**keys: Any) -> Float8Section:
    return Float8Section(**{"recipe_name": "rowwise_with_gw_hp", "convert_experts": True, **keys})


def context_of(section: Float8Section | MXSection) -> Any:
    mesh = SimpleNamespace(degree=lambda name: 1)
    return SimpleNamespace(section=section, job=SimpleNamespace(mesh=mesh), mesh={}, device=torch.device("cpu"))


def products(part: ModelPart) -> dict[str, Float8GroupedLinear]:
    return {name: module for name, module in part.named_modules() if isinstance(module, Float8GroupedLinear)}


@pytest.mark.parametrize("emulate", [False, True])
def test_experts_are_converted_and_their_share_of_float8_is_recorded(emulate: bool) -> None:
    part = float8.apply(part_of(Stack()), context_of(section(emulate=emulate)))
    (product,) = products(part).values()
    assert list(products(part)) == ["blocks.0.experts.product"] and product.emulate is emulate
    assert "blocks.0.experts" in part.slots["titan_parallel.compiler_options"]
    if emulate:
        assert "titan_debug.flops" not in part.slots
    else:  # a token uses two of four experts; two of three products
        flops = pytest.approx(6 * 4 * 64 * 64 * (2 / 4) * (2 / 3))
        assert part.slots["titan_debug.flops"]["blocks.0.experts"] == (torch.float8_e4m3fn, flops)


@pytest.mark.parametrize(
    ("keys", "exact", "reason"),
    [
        ({"convert_experts": False}, (), "float8.convert_experts = false"),
        ({"filter_fqns": ["experts"]}, (), "float8.filter_fqns"),
        ({}, ("blocks.*.experts.*",), "the model's layout"),
    ],
    ids=["not requested", "filtered", "exact"],
)
def test_experts_in_high_precision_are_logged(
    caplog: pytest.LogCaptureFixture, keys: dict[str, Any], exact: tuple[str, ...], reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert not products(float8.apply(part_of(Stack(), exact), context_of(section(emulate=True, **keys))))
    (line,) = [record.message for record in caplog.records if "experts" in record.message]
    assert line.startswith("experts in high precision") and reason in line and line.endswith(": blocks.0.experts")


def test_experts_beside_mxfp8_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        mx.apply(part_of(Stack()), context_of(MXSection(emulate=True)))
    assert "experts in high precision (mx converts linear layers only): blocks.0.experts" in caplog.messages


def test_only_experts_may_be_converted() -> None:
    part = float8.apply(part_of(Stack()), context_of(section(emulate=True, filter_fqns=["wo"])))
    assert len(products(part)) == 1


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (lambda: Stack(product=False), "computes its products itself, not with a child module GroupedLinear"),
        (lambda: Stack(out=40), "has weights 'w1' of 40 x 64, and float8 needs multiples of 16"),
    ],
    ids=["product", "sizes"],
)
def test_experts_that_cannot_be_converted_are_refused_unless_filtered(experts: Any, message: str) -> None:
    with torch.device("meta"):
        made = experts()
    with pytest.raises(UserError, match=f"'blocks.0.experts' {message}.* add 'blocks.0.experts' to float8.filter_fqns"):
        float8.apply(part_of(made), context_of(section(emulate=True)))
    kept = float8.apply(part_of(made), context_of(section(emulate=True, filter_fqns=["blocks.0.experts"])))
    assert not products(kept)


def problems(keys: dict[str, Any], rule: Any, degree: int = 1) -> list[str]:
    job = make_job("tiny")
    layout = SimpleNamespace(rules={"blocks.*.w1": rule})
    mesh = SimpleNamespace(degree=lambda name: degree)
    facts = SimpleNamespace(model=SimpleNamespace(layout=layout), model_name="m", mesh=mesh, section=lambda cls: MXSection())
    context: Any = SimpleNamespace(section=section(**keys), config=job.config, job=facts)
    return [str(problem) for problem in float8_check.check(context)]


def test_what_is_not_supported_is_refused() -> None:
    within = Experts(within=Shard(1))
    assert problems({}, Experts()) == problems({}, Experts(), 2) == problems({}, within) == []
    for keys, rule, degree, message in (
        ({"recipe_name": "rowwise"}, Experts(), 1, 'recipe_name is "rowwise"; set it to false, or set float8.recipe_name'),
        ({}, Column(), 1, "model 'm' has no experts"),
        ({}, Replicate(), 1, "model 'm' has no experts"),
        ({}, within, 2, "tensor parallelism divides each expert (the rule for 'blocks.*.w1')"),
    ):
        (problem,) = problems(keys, rule, degree)
        assert message in problem


def test_experts_need_hopper_or_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(hardware, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    job = make_job("tiny", {"float8.enable": "true", "job.device": "cpu"})

    def found(convert: bool) -> list[str]:
        context: Any = SimpleNamespace(section=section(convert_experts=convert), job=job, config=job.config)
        return [str(problem) for problem in hardware.float8(context)]

    assert found(False) == []
    assert "9.0 or newer" in found(True)[0]
