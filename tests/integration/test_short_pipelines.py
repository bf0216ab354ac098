"""Which pipelines a short one stands for."""

from __future__ import annotations

import pytest

pytest.importorskip("titan_simulate")

from titan_core.api import PipelineCosts
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.costs import costs_of
from titan_simulate.estimate.short_pipeline import blocks_of_rank, enough_microbatches, first_blocks, shortened
from titan_testing.jobs import make_job

MODEL = "{dim = 32, n_layers = 24, n_heads = 2, n_kv_heads = 2, ffn_dim = 64}"
P = "parallelism.pipeline_parallel_"
SIX_STAGES: dict[str, object] = {
    "schedule": "Interleaved1F1B", "layers_per_stage": 1, "first_stage_less_layers": 0, "last_stage_less_layers": 0,
}  # fmt: skip
"""Of a rank."""
JOB = {"model.args": MODEL, P + "degree": 8, "training.local_batch_size": 16, "training.global_batch_size": 16}


def pipelined(**settings: object) -> tuple[AssembledJob, PipelineCosts]:
    job = make_job(
        "tiny", {**JOB, **{P + key: value for key, value in settings.items()}}, int(str(settings.get("degree", 8)))
    )
    (pipeline,) = (one.pipeline for one in costs_of(job.transforms, job) if one.pipeline is not None)
    return job, pipeline


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_a_short_pipeline_has_two_ranks_and_as_many_stages_on_each(schedule: str, stages: int) -> None:
    job, pipeline = pipelined(schedule=schedule)
    short = shortened(job, pipeline, blocks=3)
    assert short is not None
    (found,) = (one.pipeline for one in costs_of(short.transforms, short) if one.pipeline is not None)
    assert (short.mesh.world_size, found.microbatches) == (2, 4)
    for rank in (0, 1):
        assert len(blocks_of_rank(found, short, rank)) == stages
        assert min(blocks_of_rank(found, short, rank)) >= 3
    assert sum(blocks_of_rank(pipeline, job, 0)) + sum(blocks_of_rank(pipeline, job, 7)) == 24 // 8 * 2


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"degree": 2, "microbatch_size": 4}, 3),
        ({"split_points": [f"layers.{3 * number}" for number in range(1, 8)]}, 3),
        ({"schedule": "Interleaved1F1B"}, 10),
        ({**SIX_STAGES, "degree": 4}, 1),
    ],
    ids=["two ranks, four microbatches", "stages by name", "too few blocks", "parameters gathered again"],
)
def test_other_pipelines_have_no_short_one(settings: dict[str, object], blocks: int) -> None:
    assert shortened(*pipelined(**settings), blocks) is None


def test_memory_repeats_after_two_microbatches_a_rank_unless_the_schedule_keeps_more() -> None:
    def enough(**settings: object) -> int:
        return enough_microbatches(pipelined(**settings)[1])

    assert enough(degree=4, schedule="1F1B") == 8
    assert enough(degree=4, schedule="GPipe") == 16
    assert enough(degree=8, schedule="1F1B") == 16


def test_a_model_of_fewer_blocks_has_their_parameters_and_those_outside_of_blocks() -> None:
    job, _ = pipelined()
    model = first_blocks(job.model, 5)
    assert model.layout.num_blocks == 5
    whole, few = (set(dict(one.build().named_parameters())) for one in (job.model, model))  # type: ignore[attr-defined]
    assert few == {name for name in whole if not name.startswith("layers.") or int(name.split(".")[1]) < 5}
    assert all(not name.startswith("layers.5.") for name in model.layout.parameters)
