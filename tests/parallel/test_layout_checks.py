"""Impossible layouts are refused before launch, with numbers that work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness import small_gpt
from harness.small_gpt import SmallGPT
from titan_core.api import (
    Column,
    Experts,
    JobContext,
    Mixer,
    ModelPart,
    Ref,
    Replicate,
    Row,
    Rule,
    Shard,
    UserError,
    causal_attention,
)
from titan_core.model.next_token import NextToken
from titan_parallel.config import ContextParallelKeys, TensorParallelKeys
from titan_parallel.context_parallel_check import check as context_check
from titan_parallel.tensor_parallel import _require_heads
from titan_parallel.tensor_parallel_check import check as tensor_check
from titan_testing.jobs import make_job

TP, CP = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
HEADS = "parallelism.context_parallel_heads_degree"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({TP: 3}, r"must divide the 8 heads and 4 key/value heads of .*; the degrees \[1, 2, 4\] do"),
        ({TP: 8}, "and 4 key/value heads of .*; set parallelism.tensor_parallel_degree = 4 or 2$"),
        (
            {TP: 2, "training.seq_len": 255},
            r"training.seq_len = 255: must be a multiple of tensor_parallel_degree \(2\), .*; set training.seq_len = 254 or",
        ),
        ({CP: 2, "training.seq_len": 250}, "2 x context-parallel degree 2 x .* 1 = 4; set training.seq_len = 248 or 252$"),
        ({CP: 2, TP: 4, "training.seq_len": 250}, "2 x tensor-parallel degree 4 = 16; set training.seq_len = 240 or 256$"),
        ({CP: 8, "training.seq_len": 2047}, "= 16; set training.seq_len = 2032 or 2048$"),
        ({HEADS: 2}, r"must divide the 1 ranks that mesh view 'cp_heads' borrows \(cp 1\); set .*heads_degree = 1, or"),
        ({CP: 4, HEADS: 3}, r"'cp_heads' borrows \(cp 4\); set parallelism.context_parallel_heads_degree = 1, 2 or 4"),
        ({CP: 16, HEADS: 16}, r"must divide the 8 heads .*; set parallelism.context_parallel_heads_degree = 8, 4, 2 or 1$"),
        (
            {TP: 4, CP: 4, HEADS: 4},
            "8 heads of .*, of which tensor-parallel degree 4 leaves 2 on a rank; set .*heads_degree = 2 or 1$",
        ),
        ({"activation_checkpoint.mode": "memory_budget"}, "needs torch.compile with the inductor backend, which enforces"),
        ({TP: 2, "parallelism.enable_async_tensor_parallel": "true"}, "needs the model compiled; .* compile.enable = true$"),
    ],
    ids=str,
)
def test_impossible_layouts_are_refused(overrides: dict[str, object], message: str) -> None:
    ranks = int(str(overrides.get(TP, 1))) * int(str(overrides.get(CP, 1)))
    with pytest.raises(UserError, match=message):
        make_job("tiny", overrides, ranks)


def test_without_sequence_parallelism_only_context_parallelism_divides_the_length() -> None:
    overrides = {CP: 2, TP: 4, "training.seq_len": 252, "parallelism.disable_sequence_parallel": "true"}
    make_job("tiny", overrides, 8)


def test_mixers_of_an_unknown_kind_need_a_rule() -> None:
    job = make_job("tiny", {CP: 2}, 2)

    def problems(mixer: Mixer) -> list[str]:
        layout = replace(job.model.layout, mixers={**job.model.layout.mixers, "other.scan": mixer})
        changed = replace(job, model=replace(job.model, layout=layout))
        return list(map(str, context_check(JobContext(section=ContextParallelKeys(), job=changed))))

    (problem,) = problems(Mixer(kind="linear_recurrence"))
    assert (
        "its mixers 'other.scan' have kind 'linear_recurrence', and context parallelism divides only 'causal_attention'"
        in problem
    )
    assert "(Mixer.divided)" in problem and problem.endswith(f"set {CP} = 1")
    assert not problems(Mixer(kind="linear_recurrence", divided=Ref("own.rule:divided")))


def test_the_heads_of_every_mixer_must_divide() -> None:
    job = make_job("tiny", {TP: 4}, 4)

    def problems(**mixers: Mixer) -> list[str]:
        layout = replace(job.model.layout, mixers=mixers)
        changed = replace(job, model=replace(job.model, layout=layout))
        return list(map(str, tensor_check(JobContext(section=TensorParallelKeys(), job=changed))))

    assert not problems() and not problems(scan=Mixer(kind="linear_recurrence"))
    (problem,) = problems(one=causal_attention(8, 4), other=Mixer(kind="linear_attention", heads=6))
    assert (
        "must divide the 6 heads and 6 key/value heads of 'other'; set parallelism.tensor_parallel_degree = 2 or 1"
        in problem
    )


def test_heads_of_a_region_that_is_whole_on_each_rank_need_not_divide() -> None:
    job = make_job("tiny", {TP: 4}, 4)

    def problems(rules: dict[str, Rule]) -> int:
        mixers = {"layers.*.attention.mixer": causal_attention(6, 3)}
        regions = ("layers.*.attention", "layers.*.feed_forward")
        layout = replace(job.model.layout, mixers=mixers, regions=regions, rules=rules)
        changed = replace(job, model=replace(job.model, layout=layout))
        return len(list(tensor_check(JobContext(section=TensorParallelKeys(), job=changed))))

    elsewhere: dict[str, Rule] = {"layers.*.feed_forward.w1.weight": Column(), "layers.*.attention.*": Replicate()}
    assert problems(elsewhere) == 0
    for pattern in ("layers.*.attention.wq.weight", "*.wq.weight", "layers.1.*", "layers.?.attention.wo", "*"):
        for rule in (Column(), Row(), Shard(0), Experts(within=Column())):
            assert problems({**elsewhere, pattern: rule}) == 1, (pattern, rule)
    assert problems({**elsewhere, "*.attention.wq.weight": Replicate(), "head.weight": Column()}) == 0


def test_heads_are_checked_again_when_the_names_of_parameters_are_known() -> None:
    layout = small_gpt.LAYOUT
    mixers = {name: replace(mixer, heads=3, kv_heads=3) for name, mixer in layout.mixers.items()}
    part = ModelPart(SmallGPT(), replace(layout, mixers=mixers), NextToken())
    regions = {".".join(name.split(".")[:-1]) for name, _ in part.named_modules() if part.layout.mixer(name) is not None}
    _require_heads(part, regions, 2)
    with pytest.raises(UserError, match=r"must divide the 3 heads and 3 key/value heads of 'blocks\.0"):
        _require_heads(part, (), 2)


@pytest.mark.parametrize("arguments", [{"kind": ""}, {"kind": "causal_attention"}, {"kind": "other", "kv_heads": 2}])
def test_an_incomplete_mixer_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"kind must not be empty|needs heads"):
        Mixer(**arguments)
