"""Pipelines are cut evenly, and impossible ones are refused with a fix."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from titan_core.api import UserError
from titan_parallel.pipeline_plan import PipelinePlan, even_cuts, plan_pipeline
from titan_testing.jobs import make_job

DEGREE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
CSV = "parallelism.pipeline_parallel_schedule_csv"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"


def plan(overrides: dict[str, object], world_size: int | None = None) -> PipelinePlan:
    return plan_pipeline(make_job("tiny", overrides, world_size or int(str(overrides[DEGREE]))))


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=9), st.integers(1, 9))
def test_no_cut_has_a_lighter_heaviest_stage(weights: list[float], number: int) -> None:
    number = min(number, len(weights))
    cuts = even_cuts(tuple(weights), number)
    assert [start for start, _ in cuts[1:]] == [end for _, end in cuts[:-1]]
    assert (cuts[0][0], cuts[-1][1], len(cuts)) == (0, len(weights), number)
    assert all(start < end for start, end in cuts)

    def heaviest(edges: tuple[int, ...]) -> float:
        return max(sum(weights[start:end]) for start, end in itertools.pairwise((0, *edges, len(weights))))

    best = min(map(heaviest, itertools.combinations(range(1, len(weights)), number - 1)))
    assert heaviest(tuple(end for _, end in cuts[:-1])) == pytest.approx(best)


def test_every_module_is_in_one_stage() -> None:
    stages = plan({DEGREE: 2, SCHEDULE: "Interleaved1F1B"}).stages
    assert [name for stage in stages for name in stage] == [
        "tok_embeddings",
        *(f"layers.{index}" for index in range(6)),
        "norm",
        "output",
    ]
    assert len(stages) == 4


def test_the_405b_model_is_cut_as_its_authors_cut_it() -> None:
    """One block fewer in the first and in the last stage (arXiv 2407.21783, section 3.3.2)."""
    args = "{dim = 16384, n_layers = 126, n_heads = 128, n_kv_heads = 8, ffn_dim = 53248, vocab_size = 128256}"
    sizes = {"model.args": args, "training.global_batch_size": 64, "parallelism.tensor_parallel_degree": 8}
    big = plan({DEGREE: 16, SCHEDULE: "1F1B", **sizes}, 16 * 8)
    blocks = [sum(name.startswith("layers") for name in stage) for stage in big.stages]
    assert blocks == [7, *[8] * 14, 7]


def test_stages_are_balanced_by_the_costs_of_blocks() -> None:
    ends = {f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    job = make_job("tiny", {DEGREE: 2, SCHEDULE: "1F1B", **ends}, 2)

    def blocks(costs: tuple[float, ...]) -> list[int]:
        layout = replace(job.model.layout, block_costs=costs)
        stages = plan_pipeline(replace(job, model=replace(job.model, layout=layout))).stages
        return [sum(name.startswith(f"{job.model.layout.blocks}.") for name in stage) for stage in stages]

    assert blocks(()) == blocks((7.0,) * 6) == [3, 3]
    assert blocks((5.0, 1.0, 1.0, 1.0, 1.0, 1.0)) == [1, 5]
    assert blocks((3.0, 1.0, 1.0, 1.0, 1.0, 1.0)) == [2, 4]


def test_stages_go_round_the_ranks_or_back_and_forth() -> None:
    assert plan({DEGREE: 3, SCHEDULE: "LoopedBFS"}).rank_of == (0, 1, 2, 0, 1, 2)
    assert plan({DEGREE: 2}).rank_of == (0, 1)
    back_and_forth = plan({DEGREE: 3, SCHEDULE: "ZBVZeroBubble"})
    assert back_and_forth.rank_of == (0, 1, 2, 2, 1, 0)
    assert back_and_forth.stages_of(0) == [0, 5]


def test_split_points_name_modules() -> None:
    by_name = {DEGREE: 2, "parallelism.pipeline_parallel_split_points": '["layers.1"]'}
    assert plan(by_name).stages[0] == ("tok_embeddings", "layers.0")


def test_layers_per_stage_decides_the_number_of_stages() -> None:
    small = {DEGREE: 2, SCHEDULE: "Interleaved1F1B", "parallelism.pipeline_parallel_layers_per_stage": 1}
    assert len(plan(small).stages) == 6


def test_a_steps_sequences_are_its_microbatches() -> None:
    assert plan({DEGREE: 2}).microbatches == 16
    assert plan({DEGREE: 2, MICROBATCH: 4}).microbatches == 4
    assert plan({DEGREE: 2, MICROBATCH: 2}, world_size=4).microbatches == 4


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({DEGREE: 8}, "8 stages need at least 8 blocks, .* has 6; set parallelism.pipeline_parallel_degree = 4 or 2$"),
        (
            {DEGREE: 4, SCHEDULE: "DualPipeV"},
            "8 stages need .*; set parallelism.pipeline_parallel_schedule = .1F1B. or .GPipe., or set .*degree = 2 or 1$",
        ),
        ({DEGREE: 2, MICROBATCH: 3}, r"must divide training.local_batch_size \(4\); set .*microbatch_size = 4, 2 or 1$"),
        (
            {DEGREE: 2, "training.global_batch_size": 1, "training.local_batch_size": 1},
            r"1F1B needs at least one microbatch per stage \(2\), .* has 1; set training.global_batch_size = 2, or",
        ),
        (
            {DEGREE: 3, SCHEDULE: "Interleaved1F1B", "training.global_batch_size": 20},
            "equal rounds over 3 ranks, and an optimizer step has 20; set training.global_batch_size = 12 or 24, or",
        ),
        ({DEGREE: 2, SCHEDULE: "InterleavedZeroBubble", "compile.enable": "true"}, "the compiler cannot compute gradients"),
        ({DEGREE: 2, "parallelism.pipeline_parallel_split_points": '["layers.9"]'}, "no stage can begin with 'layers.9'"),
        ({DEGREE: 3, "parallelism.pipeline_parallel_split_points": '["layers.3", "layers.1"]'}, "in the model's order"),
        (
            {DEGREE: 2, "parallelism.pipeline_parallel_split_points": '["layers.1", "layers.2"]'},
            "1F1B needs 1 stage.* on each of 2 ranks, and the config requests 3 stages",
        ),
        ({DEGREE: 2, SCHEDULE: "1F2B"}, "pipeline_parallel_schedule"),
    ],
    ids=str,
)
def test_impossible_pipelines_are_refused_before_launch(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(overrides)


def rows(ranks: int = 2, microbatches: int = 4) -> list[str]:
    """The rows of a GPipe schedule."""
    return [
        ",".join([f"{rank}F{m}" for m in range(microbatches)] + [f"{rank}B{m}" for m in range(microbatches)])
        for rank in range(ranks)
    ]


def test_a_schedule_from_a_file(in_tmp: Path) -> None:
    Path("s.csv").write_text("\n".join(rows()) + "\n")
    small = {DEGREE: 2, CSV: "s.csv", "training.global_batch_size": 4}
    assert plan(small).rank_of == (0, 1)
    Path("v.csv").write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    v = {DEGREE: 2, CSV: "v.csv", "training.global_batch_size": 1, "training.local_batch_size": 1}
    assert plan(v).rank_of == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "has 1 rows, and parallelism.pipeline_parallel_degree is 2"),
        ("0F0,0X0\n1F0,1B0\n", "row 1, cell 2: '0X0' is not an action"),
        ("0F0,0B0\n0F0,1B0\n", "stage 0 is already on rank 0"),
        ("0F0,0B0\n1F0\n", "stage 1 runs F for microbatch 0"),
        ("0F0,0B0\n2F0,2B0\n", "has no stage 1"),
        ("\n".join(rows(2, 3)), "schedules 3 microbatches, and the config has 4 .*; set training.local_batch_size = 3 and"),
        ("", "contains no action"),
    ],
    ids=repr,
)
def test_a_bad_schedule_file_is_refused(in_tmp: Path, text: str, message: str) -> None:
    Path("s.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        plan({DEGREE: 2, CSV: "s.csv", "training.global_batch_size": 4})


def test_a_missing_schedule_file_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        plan({DEGREE: 2, CSV: "nowhere.csv"})
