"""A fix that names values names values that work: each is set, and must pass the check that has refused the job."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings, strategies as st

from titan_core.api import Problem, UserError
from titan_testing.jobs import make_job

P = "parallelism."
PP, TP, CP = (P + f"{name}_parallel_degree" for name in ("pipeline", "tensor", "context"))
HEADS = P + "context_parallel_heads_degree"
SHARD, REPLICATE = (P + f"data_parallel_{name}_degree" for name in ("shard", "replicate"))
SCHEDULE, LAYERS, MICROBATCH = (
    P + f"pipeline_parallel_{name}" for name in ("schedule", "layers_per_stage", "microbatch_size")
)
LLAMA_70B = (
    "{dim = 8192, n_layers = 80, n_heads = 64, n_kv_heads = 8, ffn_dim = 28672, vocab_size = 128256, max_seq_len = 8192}"
)

_SETTING = re.compile(r"set (?=[a-z_]+\.[a-z_]+ = )(.+?)(?=, or set |, or start |$)")


def settings_in(fix: str) -> Iterator[dict[str, str]]:
    """Yield the overrides that a fix names: ``set a.b = 1, 2 or 4, or set c.d = 5 and e.f = 6``."""
    for text in _SETTING.findall(fix):
        pairs = [pair.split(" = ", 1) for pair in re.split(r" and (?=[a-z_]+\.[a-z_]+ = )", text)]
        if len(pairs) > 1:
            yield {key: value.strip() for key, value in pairs}
            continue
        (key, values) = pairs[0]
        lists = re.findall(r"\[[^]]*\]", values)
        yield from ({key: value.strip('" ')} for value in lists or re.split(r", | or ", values.split(" to use ")[0]))


def problems(overrides: dict[str, object], world_size: int) -> list[Problem]:
    try:
        make_job("tiny", overrides, world_size)
    except UserError as error:
        return list(error.problems)
    return []


def kind(problem: Problem) -> tuple[str, str]:
    """Return which check refused: its key, and its reason without numbers and names."""
    return problem.where.partition(" = ")[0].rpartition(": ")[2], re.sub(r"[\d.]+|'[^']*'|\S+ALL|[A-Z]\w+", "#", problem.why)


BATCH = {"a multiple of local_batch_size", "the degrees multiply to", "that mesh view"}


def assert_each_setting_helps(overrides: dict[str, object], world_size: int) -> int:
    """Return how many settings were tried."""
    tried = 0
    for problem in problems(overrides, world_size):
        for option in settings_in(problem.fix):
            left = problems({**overrides, **option}, world_size)
            assert kind(problem) not in map(kind, left), (problem, option)
            no_mesh_or_batch = [one for one in left if any(text in one.why for text in BATCH)]
            assert not no_mesh_or_batch or any(text in problem.why for text in BATCH), (problem, option, no_mesh_or_batch)
            tried += 1
    return tried


degrees = st.sampled_from([1, 1, 2, 3, 4, 8])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, object], int]:
    """Draw a job that is likely impossible, and its number of ranks."""
    chosen: dict[str, object] = {
        PP: draw(degrees),
        TP: draw(degrees),
        CP: draw(degrees),
        HEADS: draw(degrees),
        REPLICATE: draw(st.sampled_from([1, 2])),
    }
    world = draw(st.integers(1, 3))
    for key, degree in chosen.items():
        world *= 1 if key == HEADS else int(str(degree))
    shard = draw(st.sampled_from([-1, -1, 1, 2]))
    chosen |= {
        SHARD: shard,
        "training.local_batch_size": draw(st.integers(1, 6)),
        "training.global_batch_size": draw(st.sampled_from([-1, 4, 8, 12, 16, 20, 24, 48, 96])),
        "data.logical_shards": draw(st.sampled_from([0, 0, 4])),
        "training.seq_len": draw(st.sampled_from([1, 7, 16, 60, 64, 100, 250, 256])),
        "compile.enable": draw(st.sampled_from(["true", "false"])),
        "compile.components": draw(st.sampled_from(['["model", "loss"]', '["loss"]', "[]"])),
        "activation_checkpoint.mode": draw(st.sampled_from(["none", "memory_budget"])),
        P + "enable_async_tensor_parallel": draw(st.sampled_from(["true", "false"])),
        SCHEDULE: draw(st.sampled_from(["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])),
        MICROBATCH: draw(st.integers(1, 6)),
    }
    if draw(st.booleans()):
        chosen[LAYERS] = draw(st.integers(1, 7))
    return chosen, world


@pytest.mark.full
@given(jobs())
@settings(max_examples=40)
@example(({PP: 3, SCHEDULE: "Interleaved1F1B", "training.global_batch_size": 20}, 3))
@example(
    ({TP: 2, P + "enable_async_tensor_parallel": "true", "compile.components": '["loss"]', "compile.enable": "true"}, 2)
)
@example(({TP: 2, "training.seq_len": 1}, 2))
@example(({PP: 4, SHARD: 2, "training.global_batch_size": 8}, 6))
@example(({TP: 4, CP: 4, HEADS: 4}, 16))
def test_each_value_that_a_fix_names_passes_the_check(job: tuple[dict[str, object], int]) -> None:
    assert_each_setting_helps(*job)


def test_five_stages_on_each_rank_of_a_70b_model_are_refused_with_what_is_possible() -> None:
    """80 blocks, and the embedding and the head as 2 more, give 41 stages of 2. "Request 48 stages" was no fix: no whole
    number of layers gives them."""
    overrides: dict[str, object] = {
        "model.args": LLAMA_70B, PP: 8, TP: 4, LAYERS: 2, SCHEDULE: "Interleaved1F1B", "training.seq_len": 8192,
        "training.local_batch_size": 8, "training.global_batch_size": -1,
    }  # fmt: skip
    (problem,) = problems(overrides, 32)
    assert "41 stages do not divide evenly over 8 ranks" in problem.why
    found = list(settings_in(problem.fix))
    ends = {P + f"pipeline_parallel_{end}_stage_less_layers": "0" for end in ("first", "last")}
    assert {LAYERS: "11"} in found and ends in found
    for option in found:
        assert not problems({**overrides, **option}, 32), option


@pytest.mark.parametrize(
    ("fix", "expected"),
    [
        ("set a.b = 1, 2 or 4", [{"a.b": "1"}, {"a.b": "2"}, {"a.b": "4"}]),
        ('set a.b = "X" or "Y", or set c.d = ["m", "n"]', [{"a.b": "X"}, {"a.b": "Y"}, {"c.d": '["m", "n"]'}]),
        ("set a.b = 1 and c.d = 2", [{"a.b": "1", "c.d": "2"}]),
        ("set a.b = -1 to use all remaining ranks, or start 8 processes", [{"a.b": "-1"}]),
        ("use a smaller degree", []),
    ],
    ids=str,
)
def test_settings_are_found_in_a_fix(fix: str, expected: list[dict[str, str]]) -> None:
    assert list(settings_in(fix)) == expected
