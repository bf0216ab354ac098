"""What a plan may vary about these transforms: values that are worth trying, and valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from titan_core.api import Job, JobContext
from titan_parallel import planning
from titan_parallel.config import CompileSection, ContextParallelKeys, PipelineKeys, TensorParallelKeys
from titan_parallel.pipeline_check import check
from titan_parallel.pipeline_plan import plan_pipeline
from titan_testing.jobs import make_job

P = "parallelism."
PP, TP, CP = (P + f"{name}_parallel_degree" for name in ("pipeline", "tensor", "context"))
SCHEDULE, LAYERS = P + "pipeline_parallel_schedule", P + "pipeline_parallel_layers_per_stage"
ASYNC, ROTATION = P + "enable_async_tensor_parallel", P + "context_parallel_rotate_method"


def facts_of(ranks: int, **settings: object) -> Job:
    return make_job("tiny", {key.replace("__", "."): value for key, value in settings.items()}, ranks)


def pipelines(job: Job) -> Mapping[str, Sequence[Any]]:
    return planning.pipeline_choices(JobContext(section=job.section(PipelineKeys), job=job))


def test_a_pipeline_may_have_more_stages_on_a_rank_if_they_divide_evenly() -> None:
    job = facts_of(2, **{PP: 2, "model__args": "{n_layers = 20}", "compile__enable": "true"})
    offered = pipelines(job)
    assert offered[SCHEDULE] == ["1F1B", "Interleaved1F1B"]  # compiled blocks cannot split their backward pass
    default, *layers = offered[LAYERS]
    assert default is None and layers
    counts = []
    for each in offered[LAYERS]:
        config = job.config.changed({SCHEDULE: "Interleaved1F1B", LAYERS: each})
        changed = replace(job, config=config)
        assert not list(check(JobContext(section=config.section(PipelineKeys), job=changed)))
        counts.append(len(plan_pipeline(changed).stages) // 2)
    assert counts[0] == 2 and len(set(counts)) == len(counts) and max(counts) <= 5


def test_schedules_that_need_two_stages_on_a_rank_need_as_many_blocks() -> None:
    assert pipelines(facts_of(4, **{PP: 4}))[SCHEDULE] == []  # 6 blocks, not compiled: the plan tries it compiled
    assert pipelines(facts_of(4, **{PP: 4, "compile__enable": "true"}))[SCHEDULE] == ["1F1B"]
    assert pipelines(facts_of(2, **{PP: 2}))[SCHEDULE] == ["InterleavedZeroBubble", "ZBVZeroBubble"]
    fixed = pipelines(facts_of(2, **{PP: 2, "compile__enable": "false"}))[SCHEDULE]  # by the command line
    assert fixed == ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]


@pytest.mark.parametrize(
    ("settings", "ranks", "offered"),
    [
        ({TP: 2, "compile__enable": "true"}, 2, {ASYNC: (True,)}),
        ({TP: 2}, 2, {ASYNC: (False,)}),
        ({TP: 2, "compile__enable": "true", "compile__components": '["loss"]'}, 2, {ASYNC: (False,)}),
        ({TP: 2, "compile__enable": "true", P + "disable_sequence_parallel": "true"}, 2, {ASYNC: (False,)}),
        ({"compile__enable": "true"}, 1, {}),
    ],
    ids=str,
)
def test_matmuls_and_collectives_overlap_where_blocks_are_compiled(
    settings: dict[str, object], ranks: int, offered: dict[str, object]
) -> None:
    job = facts_of(ranks, **settings)
    assert planning.tensor_choices(JobContext(section=job.section(TensorParallelKeys), job=job)) == offered


def test_a_divided_sequence_may_pass_its_keys_on() -> None:
    job = facts_of(2, **{CP: 2})
    context = JobContext(section=job.section(ContextParallelKeys), job=job)
    assert planning.context_choices(context) == {ROTATION: ("allgather", "alltoall")}
    by_heads = facts_of(4, **{CP: 4, P + "context_parallel_heads_degree": 2})
    context = JobContext(section=by_heads.section(ContextParallelKeys), job=by_heads)
    assert set(planning.context_choices(context)) == {ROTATION}
    packed = facts_of(2, **{CP: 2, ROTATION: "alltoall", "data__document_mask": "true"})
    context = JobContext(section=packed.section(ContextParallelKeys), job=packed)
    assert planning.context_choices(context) == {}
    no_rings = facts_of(2, **{CP: 2, P + "context_parallel_heads_degree": 2})
    context = JobContext(section=no_rings.section(ContextParallelKeys), job=no_rings)
    assert planning.context_choices(context) == {}
    alone = facts_of(1)
    assert planning.context_choices(JobContext(section=alone.section(ContextParallelKeys), job=alone)) == {}


def test_only_a_pipeline_may_be_faster_without_the_compiler() -> None:
    for settings, ranks, expected in (({PP: 2}, 2, (True, False)), ({}, 1, (True,))):
        job = facts_of(ranks, **settings)
        context = JobContext(section=job.section(CompileSection), job=job)
        assert planning.compile_choices(context) == {"compile.enable": expected}
