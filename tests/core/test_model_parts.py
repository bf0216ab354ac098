"""Unit tests of models, batches and plans."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from harness.objectives import OfTargets
from titan_core.api import Batch, BatchPlan, Constant, ModelLayout, ModelPart, Normal, UserError
from titan_core.api.parallel.model_part import PrunedModule, arguments_of
from titan_core.api.training.batch import IGNORE, with_positions
from titan_core.model.random_values import fill, philox
from titan_testing.jobs import make_job


def plan(world_size: int, **overrides: object) -> BatchPlan:
    keys = {"local": "training.local_batch_size", "size": "training.global_batch_size", "shards": "data.logical_shards"}
    degrees = {f"parallelism.{name}_parallel_degree": degree for name, degree in overrides.items() if name not in keys}
    return make_job(
        "tiny",
        {"training.seq_len": 64, **degrees, **{keys[name]: value for name, value in overrides.items() if name in keys}},
        world_size,
    ).batch


def test_a_global_batch_is_divided_over_ranks_and_microbatches() -> None:
    assert plan(2, local=2, size=16) == BatchPlan(16, 2, 4, 2, 16, 64)
    assert plan(2, local=2, size=-1) == BatchPlan(4, 2, 1, 2, 4, 64)
    assert plan(4, local=2, size=16, shards=4) == BatchPlan(16, 2, 2, 4, 4, 64)
    assert plan(2, local=2, size=16).tokens_per_step == 16 * 64


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context"])
def test_ranks_that_share_sequences_count_once_in_the_batch(name: str) -> None:
    overrides = {name: 2, "local": 2, "size": 16}
    assert plan(4, **overrides).ranks == 2
    assert plan(2, **overrides).ranks == 1


def test_each_rank_reads_whole_logical_shards() -> None:
    with pytest.raises(UserError, match=r"data\.logical_shards = 2: must be a multiple of the data-parallel degree 4"):
        plan(4, local=1, size=8, shards=2)
    with pytest.raises(UserError, match=r"data\.logical_shards = 3"):
        plan(1, local=1, size=8, shards=3)


BATCH = Batch(torch.arange(12).view(3, 4), torch.tensor([[1, IGNORE, 2, 3]] * 3))


def test_default_positions_become_explicit() -> None:
    assert with_positions(BATCH).positions is not None
    assert torch.equal(cast(Tensor, with_positions(BATCH).positions), torch.arange(4).expand(3, 4))
    layout = tied_part().layout
    given = replace(BATCH, positions=BATCH.tokens, columns=BATCH.tokens)
    assert with_positions(given) is given
    assert arguments_of(BATCH, layout) == {}
    everything = replace(BATCH, positions=BATCH.tokens, documents=BATCH.tokens)
    assert arguments_of(everything, layout).keys() == {"positions", "documents"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.blocks = nn.ModuleDict({"0": nn.Linear(2, 2), "1": PrunedModule()})
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def tied_part(**more: Any) -> ModelPart:
    layout = ModelLayout(
        num_blocks=2, dim=2, vocab_size=4, max_seq_len=4, embedding=("embed",), blocks="blocks",
        head=("head",), tied={"head.weight": "embed.weight"},
        parameters={"embed.*": Constant(1.0), "*.weight": Normal(0.5), "*": Constant(0.0)},
    )  # fmt: skip
    return ModelPart(Tied(), layout, OfTargets(lambda logits, targets: logits.sum()), **more)


def test_batch_transforms_apply_in_order() -> None:
    def double(batch: Batch) -> Batch:
        return Batch(batch.tokens * 2, batch.targets)

    def plus_one(batch: Batch) -> Batch:
        return Batch(batch.tokens + 1, batch.targets)

    part = tied_part(batch_transforms=(plus_one, double))
    assert part.transformed(Batch(torch.tensor([[3]]), torch.tensor([[0]]))).tokens.item() == 8


def test_a_part_lists_its_present_modules() -> None:
    part = tied_part()
    assert list(part.blocks()) == ["blocks.0"]
    assert list(part.present(["blocks.1", "head"])) == ["head"]
    assert "blocks.1" not in dict(part.named_modules())
    hidden = torch.ones(2)
    assert PrunedModule()(hidden, 1, documents=None) is hidden
    part.module.head.weight = nn.Parameter(torch.zeros(4, 2))  # type: ignore[union-attr]
    part.retie()
    assert part.module.get_parameter("head.weight") is part.module.get_parameter("embed.weight")


def test_the_first_matching_pattern_sets_the_initial_value() -> None:
    layout = tied_part().layout
    assert layout.initial_value("embed.weight") == Constant(1.0)
    assert layout.initial_value("blocks.0.weight") == Normal(0.5)
    assert layout.initial_value("blocks.0.bias") == Constant(0.0)


def test_each_element_has_the_random_word_of_its_index() -> None:
    """The weights of a seed do not change between versions of Titan."""
    key = int.from_bytes(hashlib.sha256(b"7:layer.weight").digest()[:8], "little")
    words = philox(torch.arange(3), key).flatten()[:10]
    expected = torch.erfinv((2.0 * (words >> 9).float() + 1.0 - 2.0**23) / 2.0**23) * math.sqrt(2.0) * 0.5
    filled = torch.zeros(2, 5)
    fill(filled, Normal(0.5), seed=7, name="layer.weight", global_shape=(2, 5), offset=(0, 0))
    torch.testing.assert_close(filled, expected.view(2, 5))
