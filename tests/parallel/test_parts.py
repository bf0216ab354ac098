"""Unit tests of the functions that divide, order and save."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titan_core.api import ModelLayout, ModelPart, UserError, Vocabulary
from titan_core.model.next_token import NextToken
from titan_core.model.part_guard import PartGuard
from titan_core.plugins.registry import Components
from titan_parallel.activation_checkpoint import Selection
from titan_parallel.pipeline import _stage
from titan_parallel.pipeline_plan import _extra_layers
from titan_parallel.split_backward_contexts import contexts
from titan_testing.jobs import make_job

# -- pipelines


def test_the_head_counts_by_its_operations_and_the_embedding_as_half() -> None:
    job = make_job("tiny", {"parallelism.pipeline_parallel_degree": 2}, 2)
    layout, seq_len = job.model.layout, job.batch.seq_len
    head = 6.0 * layout.dim * layout.vocab_size
    block = (job.model.flops_per_token(seq_len) - head) / layout.num_blocks
    first, last = _extra_layers(job)
    assert (first, last) == pytest.approx((0.5 * head / block, head / block))
    given_weights = {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_first_stage_less_layers": 1,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    }
    assert _extra_layers(make_job("tiny", given_weights, 2)) == (1.0, 0.0)


# -- recomputation for schedules that split backward


def _every_second() -> Any:
    """Save the results of every second matmul."""
    return contexts(Selection(frozenset()).new_decision)


def test_saved_results_serve_two_backward_passes() -> None:
    weights = [nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
    x = torch.ones(2, 4, requires_grad=True)

    def compute(value: Tensor) -> Tensor:
        for weight in weights:
            value = torch.tanh(value @ weight)
        return value

    compute(x).sum().backward()
    expected = [x.grad, *(weight.grad for weight in weights)]

    result = checkpoint(compute, x, use_reentrant=False, context_fn=_every_second).sum()
    found = torch.autograd.grad(result, [x], retain_graph=True)
    found += torch.autograd.grad(result, weights, retain_graph=True)
    for gradient, exact in zip(found, expected, strict=True):
        assert exact is not None
        torch.testing.assert_close(gradient, exact)


def test_saved_matmuls_are_not_recomputed() -> None:
    forward, again = _every_second()
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(3, 3, generator=generator) for _ in range(3)]
    with forward:
        first = [factor @ factor for factor in factors]
    other = [torch.zeros(3, 3) for _ in range(3)]
    for _ in range(2):  # each recomputation counts from 0
        with again:
            second = [factor @ factor for factor in other]
        assert [torch.equal(before, after) for before, after in zip(first, second, strict=True)] == [False, True, False]


def test_a_saved_result_changed_in_place_is_computed_again() -> None:
    forward, again = _every_second()
    factor = torch.ones(2, 2)
    with forward:
        products = [factor @ factor for _ in range(2)]  # the second is saved
    products[1].zero_()
    with again:
        factor @ factor
        assert torch.equal(factor @ factor, torch.full((2, 2), 2.0))


# -- pipelines

SETTINGS: dict[str, Any] = {
    "vocabulary": Vocabulary(None, 3),
    "auxiliary_losses": ("balance",),
    "statistics": {"rows": (2, 4)},
    "batch_transforms": (lambda batch: batch,),
    "parameters_on": torch.device("cpu"),
    "saved_operators": (torch.ops.aten.max.default,),
    "slots": {"tests.notes": {"embed": "first", "head": "last"}},
    "attention_masks": lambda batch, mixers: {},
    "copies": {"head.weight": "embed.weight"},
    "after_evaluation": (lambda: None,),
    "weights_changed": (lambda: None,),
    "wrapped_objectives": (NextToken(),),
}


def test_stages_keep_every_setting_of_the_model_part_or_are_refused() -> None:
    assert SETTINGS.keys() == {field.name for field in fields(ModelPart)} - {
        "module",
        "layout",
        "objective",
        "loss_in_head",
        "batch",
    }
    refused = []
    for name, value in SETTINGS.items():
        module = nn.ModuleDict(
            {"embed": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 2)}
        )
        layout = ModelLayout(
            num_blocks=1, dim=2, vocab_size=2, max_seq_len=2, embedding=("embed",), blocks="blocks", head=("head",)
        )
        part, other = ModelPart(module, layout, NextToken()), []

        def earlier(part: ModelPart, name: str = name, value: Any = value) -> ModelPart:
            return replace(part, **{name: value})

        guard = PartGuard(Components.from_installed())
        (part,) = guard.apply("earlier", earlier, part)
        try:
            other = guard.apply(
                "pipeline", lambda part: [_stage(part, ("embed",)), _stage(part, ("blocks.0", "head"))], part
            )
        except UserError as error:
            assert f"the part's {name} that transform 'earlier' had set" in str(error)  # noqa: PT017 - settings that are kept raise nothing
            refused.append(name)
        kept = [getattr(stage, name) for stage in other]
        if name == "slots":
            assert kept == [{"tests.notes": {"embed": "first"}}, {"tests.notes": {"head": "last"}}]
        else:
            assert all(setting == value for setting in kept)
    assert refused == ["copies", "after_evaluation", "weights_changed"]
