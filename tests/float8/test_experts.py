"""Which experts are converted to float8 and MXFP8, and what is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from titan_core.api import Column, Experts, ModelLayout, ModelPart, Replicate, Router, Shard, UserError
from titan_core.model.next_token import NextToken
from titan_float8 import checks, float8, hardware, mx
from titan_float8.config import Float8Section, MXSection
from titan_float8.float8 import Float8GroupedLinear
from titan_float8.grouped import LowPrecisionGroupedLinear
from titan_float8.grouped_mx import MXGroupedLinear
from titan_nn.experts import GroupedLinear
from titan_testing.jobs import make_job

WHOLE = Experts()


class Stack(nn.Module):
    """Experts of one layer."""

    def __init__(self, out: int = 64, product: bool = True) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(4, out, 64))
        self.bias = nn.Parameter(torch.empty(4, out))
        if product:
            self.product = GroupedLinear()


def part_of(experts: nn.Module, exact: tuple[str, ...] = (), rule: Experts = WHOLE) -> ModelPart:
    layout = ModelLayout(
        num_blocks=1, dim=64, vocab_size=64, max_seq_len=8, embedding=("embed",), blocks="blocks", head=("head",),
        rules={"blocks.*.experts.w1": rule, "blocks.*.experts.bias": WHOLE},
        routers={"blocks.*.router": Router(experts=4, per_token=2)}, exact=exact,
    )  # fmt: skip
    with torch.device("meta"):
        block = nn.ModuleDict(
            {"experts": experts, "router": nn.Linear(64, 4, bias=False), "wo": nn.Linear(64, 64, bias=False)}
        )
        module = nn.ModuleDict(
            {"embed": nn.Embedding(64, 64), "blocks": nn.ModuleDict({"0": block}), "head": nn.Linear(64, 64, bias=False)}
        )
    return ModelPart(module, layout, NextToken())


HIGH_PRECISION_GRADIENTS = {"float8": "rowwise_with_gw_hp", "mx": "mxfp8_rceil_wgrad_with_hp"}
SECTIONS: dict[str, type[Float8Section] | type[MXSection]] = {"float8": Float8Section, "mx": MXSection}
PRODUCTS = {"float8": Float8GroupedLinear, "mx": MXGroupedLinear}
each_format = pytest.mark.parametrize("name", ["float8", "mx"])


def section(name: str, **keys: Any) -> Any:
    return SECTIONS[name](**{"recipe_name": HIGH_PRECISION_GRADIENTS[name], "convert_experts": True, **keys})


def applied(name: str, part: ModelPart, degree: int = 1, **keys: Any) -> ModelPart:
    mesh = SimpleNamespace(degree=lambda name: degree if name == "tp" else 1)
    job = SimpleNamespace(mesh=mesh)
    context: Any = SimpleNamespace(section=section(name, **keys), job=job, mesh={}, device=torch.device("cpu"))
    return {"float8": float8.apply, "mx": mx.apply}[name](part, context)


def products(part: ModelPart) -> dict[str, LowPrecisionGroupedLinear]:
    return {name: module for name, module in part.named_modules() if isinstance(module, LowPrecisionGroupedLinear)}


@each_format
@pytest.mark.parametrize("emulate", [False, True])
def test_experts_are_converted_and_their_share_of_8_bits_is_recorded(name: str, emulate: bool) -> None:
    part = applied(name, part_of(Stack()), emulate=emulate)
    (product,) = products(part).values()
    assert list(products(part)) == ["blocks.0.experts.product"] and product.emulate is emulate
    assert type(product) is PRODUCTS[name]
    if name == "float8":
        assert "blocks.0.experts" in part.slots["titan_parallel.compiler_options"]
    if emulate:
        assert "titan_debug.flops" not in part.slots
    else:  # a token uses two of four experts; two of three products
        flops = pytest.approx(6 * 4 * 64 * 64 * (2 / 4) * (2 / 3))
        assert part.slots["titan_debug.flops"]["blocks.0.experts"] == (torch.float8_e4m3fn, flops)


@each_format
@pytest.mark.parametrize(
    ("keys", "exact", "reason"),
    [
        ({"convert_experts": False}, (), "{}.convert_experts = false"),
        ({"filter_fqns": ["experts"]}, (), "{}.filter_fqns"),
        ({}, ("blocks.*.experts.*",), "the model's layout"),
    ],
    ids=["not requested", "filtered", "exact"],
)
def test_experts_in_high_precision_are_logged(
    caplog: pytest.LogCaptureFixture, name: str, keys: dict[str, Any], exact: tuple[str, ...], reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert not products(applied(name, part_of(Stack(), exact), emulate=True, **keys))
    (line,) = [record.message for record in caplog.records if "experts" in record.message]
    assert line.startswith("experts in high precision") and line.endswith(": blocks.0.experts")
    assert reason.format(name) in line


@each_format
def test_only_experts_may_be_converted(name: str) -> None:
    part = applied(name, part_of(Stack()), emulate=True, filter_fqns=["wo"])
    assert len(products(part)) == 1


@each_format
def test_experts_that_compute_their_products_themselves_are_refused_unless_filtered(name: str) -> None:
    with torch.device("meta"):
        made = Stack(product=False)
    message = "computes its products itself, not with a child module GroupedLinear"
    with pytest.raises(UserError, match=f"'blocks.0.experts' {message}.* add 'blocks.0.experts' to {name}.filter_fqns"):
        applied(name, part_of(made), emulate=True)
    kept = applied(name, part_of(made), emulate=True, filter_fqns=["blocks.0.experts"])
    assert not products(kept)


@pytest.mark.parametrize(
    ("name", "out", "degree", "message"),
    [
        ("float8", 40, 1, "has weights 'w1' of 40 x 64, and float8 needs multiples of 16"),
        ("mx", 48, 1, "has weights 'w1' of 48 x 64, and MXFP8 needs multiples of 32"),
        ("mx", 96, 2, "has weights 'w1' of 96 x 64, and MXFP8 needs multiples of 32, and of 32 x tensor_parallel_degree = 64"
                      r" where tensor parallelism divides it \(96\)"),
    ],
)  # fmt: skip
def test_experts_of_other_sizes_are_refused(name: str, out: int, degree: int, message: str) -> None:
    part = part_of(Stack(out), rule=Experts(within=Shard(1)))
    with pytest.raises(UserError, match=f"'blocks.0.experts' {message}.* add 'blocks.0.experts' to {name}.filter_fqns"):
        applied(name, part, degree, emulate=True)


def test_tensor_parallelism_may_divide_experts_in_mxfp8_between_blocks() -> None:
    for rule, out in ((Experts(within=Shard(1)), 128), (Experts(), 96)):
        assert products(applied("mx", part_of(Stack(out), rule=rule), 2, emulate=True))


def problems(name: str, keys: dict[str, Any], rule: Any, degree: int = 1) -> list[str]:
    job = make_job("tiny")
    layout = SimpleNamespace(rules={"blocks.*.w1": rule})
    mesh = SimpleNamespace(degree=lambda name: degree)
    facts = SimpleNamespace(model=SimpleNamespace(layout=layout), model_name="m", mesh=mesh, section=lambda cls: MXSection())
    context: Any = SimpleNamespace(section=section(name, **keys), config=job.config, job=facts)
    return [str(problem) for problem in (checks.check if name == "float8" else checks.check_mx)(context)]


def test_what_is_not_supported_is_refused() -> None:
    within = Experts(within=Shard(1))
    for name in ("float8", "mx"):
        assert problems(name, {}, Experts()) == problems(name, {}, Experts(), 2) == problems(name, {}, within) == []
    assert problems("mx", {}, within, 2) == problems("mx", {"convert_experts": False}, Column()) == []
    blocks = "in weight gradients of experts rows would share a scale: rows of different tokens"
    for name, keys, rule, degree, message in (
        ("float8", {"recipe_name": "rowwise"}, Experts(), 1,
         'recipe_name is "rowwise"; set it to false, or set float8.recipe_name = "rowwise_with_gw_hp"'),
        ("mx", {"recipe_name": "mxfp8_rceil"}, Experts(), 1, f'recipe_name is "mxfp8_rceil", and {blocks}'),
        ("mx", {"recipe_name": "mxfp8_floor"}, Experts(), 1,
         'depend on the mesh; set it to false, or set mx.recipe_name = "mxfp8_rceil_wgrad_with_hp"'),
        ("float8", {}, Column(), 1, "model 'm' has no experts"),
        ("mx", {}, Replicate(), 1, "model 'm' has no experts"),
        ("float8", {}, within, 2, "tensor parallelism divides each expert (the rule for 'blocks.*.w1')"),
    ):  # fmt: skip
        (problem,) = problems(name, keys, rule, degree)
        assert message in problem and f"{name}.convert_experts" in problem


@pytest.mark.parametrize(
    ("name", "capability", "key", "needed"),
    [
        ("float8", (8, 0), "float8.enable", "8.9 or newer"),
        ("float8", (8, 9), "float8.convert_experts", "9.x, for which torch has such products"),
        ("float8", (9, 0), None, ""),
        ("float8", (10, 0), "float8.convert_experts", "9.x, for which torch has such products"),
        ("mx", (9, 0), "mx.enable", "10.0 or newer"),
        ("mx", (10, 3), None, ""),
        ("mx", (12, 0), "mx.convert_experts", "10.x, for which torch has such products"),
    ],
)
def test_experts_need_a_gpu_with_grouped_products(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], key: str | None, needed: str
) -> None:
    monkeypatch.setattr(hardware, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(hardware, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    job = make_job("tiny", {f"{name}.enable": "true", "job.device": "cpu"})

    def found(**keys: Any) -> list[str]:
        context: Any = SimpleNamespace(section=section(name, **keys), job=job, config=job.config)
        return [str(problem) for problem in {"float8": hardware.float8, "mx": hardware.mxfp8}[name](context)]

    assert found(emulate=True) == []
    if key is None:
        assert found() == []
        return
    (problem,) = found()
    assert key in problem and f"capability {needed}, and" in problem and f"or {key} = false" in problem
    assert (found(convert_experts=False) == []) is key.endswith("experts")
