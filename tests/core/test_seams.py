"""What one plugin has set, another neither drops nor replaces; ranks with different data have a sum of their gradients."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import ClassVar, Literal

import pytest
import torch
from torch import nn

from harness import transforms
from harness.small_gpt import LAYOUT
from titan_core.api.batch import Batch
from titan_core.api.components import Phase, Transform
from titan_core.api.config import Override
from titan_core.api.errors import UserError
from titan_core.api.job import Job
from titan_core.api.mesh import MeshDim
from titan_core.api.model_part import ModelPart
from titan_core.api.ref import Ref
from titan_core.api.section import Section
from titan_core.api.vocabulary import Vocabulary
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.model.next_token import NextToken
from titan_core.model.part_guard import PartGuard
from titan_core.plugins.discovery import Plugin
from titan_core.plugins.registry import Registry


def apply_all(*names: str) -> ModelPart:
    (part,) = parts = [ModelPart(nn.Linear(1, 1), LAYOUT, NextToken())]
    guard = PartGuard(part)
    for name in names:
        function = getattr(transforms, name)
        parts = guard.apply(name, lambda part, function=function: function(part, None), parts[0])
    return parts[0]


@pytest.mark.parametrize(
    ("names", "setting"),
    [
        (("wrapped_loss", "other_loss"), "objective"),
        (("offloaded", "elsewhere"), "parameters_on"),
        (("batches", "only_my_batches"), "batch_transforms"),
        (("accounts", "no_accounts"), "flops"),
        (("casts", "casts"), "casts"),
        (("casts", "bare"), "casts"),
        (("evaluation", "bare"), "after_evaluation"),
        (("saves_silu", "bare"), "saved_operators"),
        (("batches", "bare"), "batch_transforms"),
        (("offloaded", "bare"), "parameters_on"),
        (("accounts", "bare"), "flops"),
    ],
    ids=str,
)
def test_what_a_transform_set_is_not_dropped(names: tuple[str, str], setting: str) -> None:
    first, second = names
    message = f"transform '{second}': it drops or replaces the part's {setting} that transform '{first}' had set; switch one"
    with pytest.raises(UserError, match=message):
        apply_all(*names)


def test_transforms_may_build_on_each_other() -> None:
    part = apply_all("wrapped_loss", "wrapped_loss", "batches", "batches", "accounts", "accounts", "casts")
    logits, batch = torch.randn(1, 3, 5), Batch(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[0, 1, 2]]))
    loss, plain = (objective(logits, batch, Vocabulary()) for objective in (part.objective, NextToken()))
    assert loss.item() == pytest.approx((plain + 2e-3 * logits.square().sum()).item())
    assert part.flops == {torch.float16: 4.0}
    assert len(part.batch_transforms) == 2
    assert isinstance(apply_all("bare").objective, NextToken)


def test_the_job_s_objective_is_not_dropped() -> None:
    with pytest.raises(UserError, match="transform 'other_loss': it drops or replaces the part's objective that was set"):
        apply_all("other_loss")


class RingKeys(Section):
    section: ClassVar[str] = "ring"

    degree: int = 1


Divides = Literal["layers", "batch", "sequence", "weights"]


Treated = Literal["shard", "replicate", "own"]


def ring_job(divides: Divides, copies: bool = False, reduces: tuple[str, ...] = (), treated: Treated = "own") -> Job:
    """A job on 2 ranks that a third party's mesh dimension takes."""
    ring = Transform(
        name="ring",
        summary="",
        config=RingKeys,
        phase=Phase.DATA,
        mesh_dims=(MeshDim("ring", "ring.degree", divides, copies, data_parallel=treated),),
        active=lambda context: context.facts.mesh.degree("ring") > 1,
        serves=("ring.degree",),
        reduces=reduces,
        apply=Ref("harness.transforms:bare"),
    )
    found = Registry.from_installed().found
    plugins = (*found.plugins, Plugin("ring", "titan-ring", "1.0", ModuleType("ring"), (ring,)))
    config, registry = load_config("tiny", [Override("ring.degree", "2")], Registry(replace(found, plugins=plugins)))
    return assemble(config, registry, 2)


@pytest.mark.parametrize("divides", ["batch", "sequence"])
def test_a_dimension_with_different_data_needs_a_sum_of_gradients(divides: Divides) -> None:
    message = rf"ring\.degree = 2.*: mesh dimension 'ring' divides the {divides} over 2 ranks, and no transform in use sums"
    with pytest.raises(UserError, match=message) as caught:
        ring_job(divides)
    assert "reduces = ('ring',)" in str(caught.value)
    assert ring_job(divides, reduces=("ring",)).facts.mesh.degree("ring") == 2
    assert ring_job(divides, copies=True).facts.mesh.copies == 2


@pytest.mark.parametrize("treated", ["shard", "replicate"])
@pytest.mark.parametrize("divides", ["batch", "sequence"])
def test_data_parallelism_covers_a_third_partys_dimension(divides: Divides, treated: Treated) -> None:
    job = ring_job(divides, treated=treated)
    assert "fsdp" in {transform.name for transform in job.transforms}
    assert job.facts.mesh.data_dims(treated)[-1] == "ring"


@pytest.mark.parametrize("divides", ["layers", "weights"])
def test_a_dimension_with_the_same_data_needs_none(divides: Divides) -> None:
    assert ring_job(divides).facts.mesh.degree("ring") == 2
