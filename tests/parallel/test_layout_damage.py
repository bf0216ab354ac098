# ruff: noqa: E501 - one damage per line reads best
"""A layout that contradicts its model, or a model that would train differently when divided, is refused before the first step
with the name of the field. Each damage here once trained wrong or ended in a traceback."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.model_trials import CP, DOCUMENTS, DP, NO_SP, ONE, PP, TP, job_on, require
from harness.odd_gpts import (
    APART,
    OWN,
    BatchNorm,
    CalledBy,
    Convolution,
    PositionsApart,
    Recurrence,
    ReturnsMore,
    SeesTheNext,
    SkipConnections,
    Twice,
    UsesTheWeightAlone,
    add_dropout,
    between,
    choosing_tokens,
    keeps_state,
    mixed,
    mixed_of,
    own_gain,
    own_parameter,
    own_parameters,
    positions_from_one,
    shifted,
    tied,
    with_shifted_norm,
    with_wrapped_head,
    without_documents,
    without_positions,
)  # fmt: skip
from harness.small_gpt import DIM, HEADS, KV_HEADS, LAYOUT, SmallGPT, changed, with_parts
from titan_core.api import JobContext, ModelLayout, ModelPart, Replicate, Rule, UserError, causal_attention
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.next_token import NextToken
from titan_parallel import tensor_parallel
from titan_parallel.checks import check_data_parallel
from titan_parallel.config import FSDPKeys

BUFFER = {"steps": lambda: torch.zeros(1)}


@dataclass(frozen=True)
class Damage:
    name: str
    mesh: dict[str, object]
    message: str
    build: Callable[[], object] = SmallGPT
    layout: ModelLayout = LAYOUT


MIXER = causal_attention(HEADS, KV_HEADS)
INNER_MIXER = replace(LAYOUT, mixers={"blocks.*.attention.mixer.inner": MIXER})


def _scaled(own: random.Random, x: torch.Tensor) -> torch.Tensor:
    return x * own.random()


def mixers(heads: int, kv_heads: int | None) -> ModelLayout:
    return replace(LAYOUT, mixers={"blocks.*.attention.mixer": causal_attention(heads, kv_heads)})


def ruled(rules: dict[str, Rule], **fields: Any) -> ModelLayout:
    """Return the layout with ``rules`` before its own."""
    return replace(LAYOUT, rules={**rules, **LAYOUT.rules, **rules}, **fields)


DAMAGES = [
    # -- every parameter belongs to one unit
    Damage("a head without its norm", ONE, r"'norm\.weight' belongs to none of .* add its module 'norm'", layout=replace(LAYOUT, head=("output",))),
    Damage("half an embedding", ONE, r"'wpe\.weight' belongs to none of embedding", PositionsApart, replace(LAYOUT, embedding=("wte",))),
    Damage("a part of the embedding in the head", ONE, r"head names 'embedding\.token', which is part of 'embedding' in embedding", layout=replace(LAYOUT, head=("embedding.token", "norm", "output"))),
    Damage("a module twice", ONE, "'norm' is named more than once in embedding, blocks and head", layout=replace(LAYOUT, embedding=("embedding", "norm"))),
    Damage("the model's own parameter", ONE, "'scale' belongs to none of .* move it into a module", own_parameter("")),
    Damage("a parameter beside the blocks", ONE, r"'blocks\.scale' belongs to none of", own_parameter("blocks")),
    Damage("a buffer that is saved", ONE, "persistent buffer 'steps' belongs to none of", own_parameter("buffer"), replace(LAYOUT, buffers=BUFFER)),
    # -- sizes
    Damage("another vocabulary", ONE, r"logits \[batch, seq, vocab_size\] = \[2, 16, 300\], but returns \[2, 16, 288\]", layout=replace(LAYOUT, vocab_size=300)),
    Damage("another width", ONE, r"hidden states \[batch, seq, dim\] = \[2, 16, 32\], but returns \[2, 16, 24\]; fix dim", layout=replace(LAYOUT, dim=32)),
    Damage("other heads", ONE, "heads is 8 and kv_heads 2, but 'blocks.0.attention.mixer' is called with 4 and 2", layout=mixers(8, KV_HEADS)),
    Damage("another window", ONE, "mixers says {'window': 5} of 'blocks.0.attention.mixer', which computes with {'window': None}", layout=replace(LAYOUT, mixers={"blocks.*.attention.mixer": causal_attention(HEADS, KV_HEADS, window=5)})),
    Damage("other key heads", ONE, "heads is 4 and kv_heads 4, .* is called with 4 and 2", layout=mixers(HEADS, None)),
    Damage("a longer context", ONE, "max_seq_len is 65, but position 64 raises IndexError", layout=replace(LAYOUT, max_seq_len=65)),
    # -- calls
    Damage("a module that is not called", ONE, "names 'output', but the model's forward never calls it", UsesTheWeightAlone),
    Damage("more than logits", ONE, r"must return logits .* but returns tuple", ReturnsMore),
    Damage("mixers by keyword", ONE, r"mixers names '.*inner', which is called with keyword arguments only; call it with \(q, k, v\)", with_parts({"attention.mixer": lambda: CalledBy("keywords")}), INNER_MIXER),
    Damage("mixers in another order", ONE, r"mixers names '.*inner', which is called with \[2, 16, 4, 6\]", with_parts({"attention.mixer": lambda: CalledBy("transposed")}), INNER_MIXER),
    Damage("documents ignored", DOCUMENTS, "each gives alone: in the second one, module 'blocks.0.attention.mixer' depends on tokens of the first", without_documents),
    Damage("positions ignored, documents", DOCUMENTS, "two documents in one sequence give other logits than each gives alone", without_positions),
    # -- sequences of a batch
    Damage("a statistic of the batch", DP, r"module 'blocks\.1\.extra' mixes the sequences of a batch", mixed_of(lambda x: x - x[:, :1].mean(0, keepdim=True))),
    Damage("a mean over the batch", ONE, r"'blocks\.1\.norms\.0', depends on other sequences of the batch; compute each sequence", mixed_of(lambda x: x.mean(0, keepdim=True))),
    Damage("a batch norm", ONE, r"module 'blocks\.1\.extra' depends on other sequences of the batch", mixed(BatchNorm)),
    # -- random draws
    *(
        Damage(f"{name} draws", ONE, rf"its logits in training depend on random numbers that would differ between meshes: {place}", build)
        for name, place, build in [
            ("a dropout between", r"'dropout' \(bernoulli_\)", changed(add_dropout)),
            ("a dropout in blocks", r"'blocks\.0\.dropout' \(bernoulli_\); draw with titan_core\.api\.Dropout", with_parts({"dropout": lambda: nn.Dropout(1e-6)})),
            ("a jitter", r"'blocks\.1\.extra' \(uniform_\)", mixed_of(lambda x: x * torch.empty_like(x).uniform_(1 - 1e-6, 1 + 1e-6))),
            ("a layer that is dropped", r"'blocks\.1\.extra' \(rand\)", mixed_of(lambda x: x * (torch.rand([]) > 1e-6))),
            ("a choice", r"'blocks\.1\.extra' \(multinomial\)", mixed_of(lambda x: x * torch.multinomial(torch.ones(2), 1))),
            ("Python's generator", r"'blocks\.1\.extra' \(numbers of Python or numpy\)", mixed_of(lambda x: x * (random.random() > 0.01))),
            ("numpy's generator", r"'blocks\.1\.extra' \(numbers of Python or numpy\)", mixed_of(lambda x: x * (np.random.rand() > 0.01))),
            ("a generator of its own", "two calls with the same tokens differ", mixed_of(partial(_scaled, random.Random(0)))),
        ]
    ),
    # -- later tokens
    *(
        Damage(name, mesh, rf"{place} depends on later tokens, so the model sees the token that it is to predict", build, layout)
        for name, mesh, place, build, layout in [
            ("a look ahead", ONE, r"module 'blocks\.1\.extra'", mixed_of(lambda x: x.roll(-1, 1)), LAYOUT),
            ("a mean of positions", ONE, r"the forward of module 'blocks\.1', before it calls 'blocks\.1\.norms\.0',", mixed_of(lambda x: x.mean(1, keepdim=True)), LAYOUT),
            ("a norm over positions", ONE, r"module 'blocks\.1\.extra'", mixed_of(lambda x: x / x.norm(dim=1, keepdim=True)), LAYOUT),
            ("a reversal", TP, r"module 'blocks\.1\.extra'", mixed_of(lambda x: x.flip(1)), LAYOUT),
            ("experts that choose tokens", ONE, r"module 'blocks\.1\.extra'", mixed_of(choosing_tokens), LAYOUT),
            ("a mixer that sees the next token", ONE, r"module 'blocks\.0\.attention\.mixer'", with_parts({"attention.mixer": SeesTheNext}), LAYOUT),
            ("a mixer that sees the next token of its document", DOCUMENTS, r"module 'blocks\.0\.attention\.mixer'", with_parts({"attention.mixer": lambda: SeesTheNext(of_document=True)}), LAYOUT),
            ("logits that see the next token", ONE, "the model's forward, after its last module,", between(logits=lambda x: x + x.roll(-1, 1)), LAYOUT),
        ]
    ),
    # -- pipelines
    Damage("embeddings apart, PP", PP, "between 'wte' and 'wpe', the model's forward changes or replaces the hidden states", PositionsApart, APART),
    Damage("a scale between", PP, r"between 'embedding' and 'blocks\.0', the model's forward changes", between(embedded=lambda h: h * DIM**0.5)),
    Damage("logits capped", PP, "after 'output', the model's forward changes the logits", between(logits=torch.tanh)),
    Damage("skip connections", PP, r"between 'blocks\.1' and 'norm', the model's forward changes", SkipConnections),
    Damage("blocks called twice", PP, r"cut into stages, the model's output differs", Twice),
    Damage("state between blocks", PP, "depend only on its hidden states", keeps_state),
    Damage("positions counted from one, PP", PP, "read positions from the argument positions", positions_from_one),
    # -- context parallelism
    *(
        Damage(f"{name}, CP", CP, rf"{place},? depends on other positions but is not in mixers", build)
        for name, place, build in [
            ("a convolution", r"module 'blocks\.1\.extra', before it calls 'blocks\.1\.extra\.convolution'", mixed(Convolution)),
            ("a convolution in the first block", r"module 'blocks\.0\.extra', before it calls 'blocks\.0\.extra\.convolution'", mixed(Convolution, 0)),
            ("a dilated convolution", r"extra\.convolution'", mixed(lambda: Convolution(15))),
            ("a recurrence", r"module 'blocks\.1\.extra\.gru'", mixed(Recurrence)),
            ("a running sum", r"module 'blocks\.1\.extra'", mixed_of(lambda x: x.cumsum(1))),
            ("a token shift", r"module 'blocks\.1\.extra'", mixed_of(shifted)),
            ("a norm that shifts", r"module 'blocks\.0\.norms\.0'", with_shifted_norm),
            ("a shift behind the embedding", "the forward of the model, before it calls 'blocks.0'", between(embedded=shifted)),
            ("a shift of the logits", "after its last module", between(logits=shifted)),
            ("positions ignored", "", without_positions),
        ]
    ),
    Damage("a mixer that is not named", CP, r"mixer' depends on other positions but is not in mixers", layout=replace(LAYOUT, mixers={"blocks.0.attention.mixer": MIXER}), build=mixed(nn.Identity)),
    # -- tensor parallelism
    Damage("a layer outside regions", TP, r"rules have Column\(\) for 'blocks\.0\.mlp\.up\.weight', which is outside all regions", layout=replace(LAYOUT, regions=("blocks.*.attention",))),
    Damage("a region without a row", TP, r"regions names 'blocks\.0\.mlp', which has no layer with the rule Row", layout=ruled({"blocks.*.mlp.down.*": Replicate()})),
    Damage("a region without a column", TP, r"regions names 'blocks\.0\.mlp', which has no parameter with the rule Column", layout=ruled({"blocks.*.mlp.up.*": Replicate()})),
    Damage("a region within a region", TP, r"regions names 'blocks\.0\.attention', which is inside the region 'blocks\.0'", layout=replace(LAYOUT, regions=("blocks.[01]", *LAYOUT.regions))),
    Damage("sums that are not summed", TP, r"regions names 'blocks\.0\.mlp', which has no layer with the rule Row and no module in sums", own_parameters, replace(OWN, sums=())),
    Damage("a head that ends otherwise", TP, "head ends with 'output', and tensor parallelism needs an nn.Linear", with_wrapped_head),
    Damage("embeddings apart, TP", TP, "outside regions, .* does not take hidden states", PositionsApart, APART),
    Damage("a running sum, TP", TP, r"outside regions, module 'blocks\.1\.extra'", mixed_of(lambda x: x.cumsum(1))),
    Damage("a norm that shifts, TP", TP, r"module 'blocks\.0\.norms\.0' .* or depends on other positions", with_shifted_norm),
    Damage("a shift between, TP", TP, "outside regions, the forward of the model, before it calls 'blocks.0'", between(embedded=shifted)),
    Damage("logits normed", TP, "changes the logits that 'output' returns", between(logits=lambda x: x.log_softmax(-1))),
    Damage("positions counted from one, TP", NO_SP, "read positions from the argument positions", positions_from_one),
]  # fmt: skip


@pytest.mark.quick_rows(16)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_damage_is_refused(damage: Damage) -> None:
    with pytest.raises(UserError, match=damage.message) as caught:
        require(job_on(damage.mesh, damage.build, damage.layout))
    assert all(problem.where == "layout of model 'small'" or "tiny" in problem.where for problem in caught.value.problems)
    assert all(problem.fix for problem in caught.value.problems)


def context_of(job: AssembledJob) -> JobContext[FSDPKeys]:
    return JobContext(section=job.config.section(FSDPKeys), job=job)


def test_tied_parameters_must_be_in_one_fsdp_unit() -> None:
    layout = replace(LAYOUT, tied={"blocks.1.mlp.up.weight": "blocks.0.mlp.up.weight"})
    (problem,) = check_data_parallel(context_of(job_on(DP, tied, layout)))
    assert "ties 'blocks.1.mlp.up.weight' to 'blocks.0.mlp.up.weight', and FSDP gathers the two separately" in str(problem)
    for pair in ("output.weight", "embedding.token.weight"), ("blocks.0.mlp.up.weight", "blocks.0.attention.q.weight"):
        shared = replace(LAYOUT, tied=dict([pair]))
        assert not list(check_data_parallel(context_of(job_on(DP, SmallGPT, shared))))


def test_a_parameter_without_a_rule_is_refused() -> None:
    def plan_of(model: nn.Module) -> None:
        tensor_parallel._require_rules(ModelPart(model, LAYOUT, NextToken()))

    plan_of(SmallGPT())
    with pytest.raises(
        UserError, match=r"^parameter 'blocks\.0\.attention\.gain' of the model: has no rule for tensor parallelism"
    ):
        plan_of(own_gain())
