"""``titan estimate``: memory and time of a job, from a few blocks.

``uv run pytest -m long tests/integration/test_estimate.py`` estimates the large jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.fake_cuda import FakeCuda
from harness.hf_families import settings as settings_of
from harness.quick import rows
from titan_testing.jobs import make_job

pytest.importorskip("titan_simulate")

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate

MODEL = "{dim = 256, n_layers = 6, n_heads = 8, n_kv_heads = 4, ffn_dim = 512}"
JOB = {
    "model.args": MODEL,
    "training.seq_len": 512,
    "training.local_batch_size": 4,
    "training.global_batch_size": -1,
    "compile.enable": "false",
    "parallelism.fsdp_group_mib": 0.0,  # otherwise FSDP gathers several of these small blocks together: all are simulated
}

FROZEN: dict[str, object] = {
    "model.args": "{dim = 256, n_layers = 24, n_heads = 8, n_kv_heads = 4, ffn_dim = 512}",
    "training.freeze": '["tok_embeddings.*", "layers.[01].*"]',
}
WINDOWS = "{dim = 256, n_layers = 9, n_heads = 8, n_kv_heads = 4, ffn_dim = 512, window = 128}"


def estimated(
    settings: Mapping[str, object],
    world_size: int,
    every_block: bool = False,
    every_microbatch: bool = False,
    recipe: str = "llama3_debug",
    **options: Any,
) -> Estimate:
    """Estimate a recipe in this process, in which CUDA is simulated."""
    from titan_core.api.config.resolved import Override
    from titan_core.api.plugins.assembled_job import AssembledJob
    from titan_core.loop.training import train
    from titan_simulate.estimate import estimate as module
    from titan_simulate.hardware.read import read_machine

    def job_of(more: Sequence[Override]) -> AssembledJob:
        return make_job(recipe, {**settings, **{one.key: one.text for one in more}}, world_size, missing_ok=True)

    if every_block:
        setattr(module, "FEW", 10**6)  # noqa: B010 - in a process of its own
    if every_microbatch:
        setattr(module, "_reduction", lambda job, pipeline, more: ({}, 1.0, 0))  # noqa: B010
    return module.estimate(job_of, train, read_machine("h100"), **options)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({}, 8),
        ({"activation_checkpoint.mode": "full", "parallelism.tensor_parallel_degree": 2}, 8),
        ({"parallelism.pipeline_parallel_degree": 2, "activation_checkpoint.mode": "selective"}, 4),
        ({"training.freeze": '["tok_embeddings.*", "layers.[0123].*"]'}, 8),
        ({**FROZEN, "parallelism.pipeline_parallel_degree": 4, "training.local_batch_size": 8}, 4),
        ({"model.name": "tiny", "model.args": WINDOWS, "data.document_mask": "true"}, 8),
    ],
    ids=["fsdp", "tp and full recomputation", "pp", "frozen blocks", "first blocks frozen, pp", "windows"],
)
def test_a_few_blocks_give_the_memory_of_all(fake_cuda: FakeCuda, settings: dict[str, object], world_size: int) -> None:
    recipe = "tiny" if settings.get("model.name") == "tiny" else "llama3_debug"
    require_few_give_all(fake_cuda, {**JOB, **settings}, world_size, recipe)


@pytest.mark.parametrize(
    ("family", "more"), [("llama", {}), ("deepseek_v3", {"first_k_dense_replace": 2})], ids=["llama", "deepseek_v3"]
)
def test_a_few_blocks_of_transformers_give_the_memory_of_all(
    fake_cuda: FakeCuda, tmp_path: Path, family: str, more: dict[str, object]
) -> None:
    """Whose blocks have names of three parts, ``model.layers.0``: nothing was extended from block to block."""
    pytest.importorskip("titan_models_hf")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 512, **more}
    job = {**JOB, **settings_of(family, "one", None, tmp_path, **sizes), "job.device": "cuda"}
    job |= {key: JOB[key] for key in JOB if key.startswith("training")}
    make_job("hf_debug", job, missing_ok=True)  # as below
    require_few_give_all(fake_cuda, job, 8, "hf_debug", rel=2e-2)


def require_few_give_all(
    fake_cuda: FakeCuda, job: dict[str, object], world_size: int, recipe: str, rel: float = 1e-2
) -> None:
    few = fake_cuda.call(estimated, job, world_size, recipe=recipe)
    every = fake_cuda.call(estimated, job, world_size, every_block=True, recipe=recipe)
    assert few.allocated_gib == pytest.approx(every.allocated_gib, rel=rel)  # moments of small models overlap
    assert few.reserved_gib == pytest.approx(every.reserved_gib, abs=0.02)  # in pages of 20 MiB
    assert few.memory == pytest.approx(every.memory, rel=rel, abs=0.02)
    assert few.step_seconds == pytest.approx(every.step_seconds, rel=0.03)
    counts = [{(one.operator, one.group): one.count for one in found.collectives} for found in (few, every)]
    assert counts[0] == pytest.approx(counts[1])


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("1F1B", 4), ("1F1B", 2), pytest.param("Interleaved1F1B", 4, marks=pytest.mark.full),
        pytest.param("Interleaved1F1B", 2, marks=pytest.mark.full), pytest.param("ZBVZeroBubble", 4, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_short_pipeline_stands_for_a_long_one(fake_cuda: FakeCuda, schedule: str, ranks: int) -> None:
    pipeline = {"parallelism.pipeline_parallel_degree": ranks, "parallelism.pipeline_parallel_schedule": schedule}
    model = "{dim = 256, n_layers = 12, n_heads = 8, n_kv_heads = 4, ffn_dim = 512}"
    job = {**JOB, **pipeline, "training.local_batch_size": 12, "model.args": model}
    short = fake_cuda.call(estimated, job, 8)
    whole = fake_cuda.call(estimated, job, 8, every_microbatch=True)
    assert (short.assumptions["simulated microbatches"], whole.assumptions["simulated microbatches"]) == ("4 of 12", "all")
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert short.bubble == pytest.approx(whole.bubble, abs=0.01)
    assert short.allocated_gib == pytest.approx(whole.allocated_gib, rel=0.025)
    assert short.memory["activations"] == pytest.approx(whole.memory["activations"], rel=0.05)
    counts = [{(one.operator, one.group): one.count for one in found.collectives} for found in (short, whole)]
    assert counts[0] == pytest.approx(counts[1])


def test_the_parts_of_an_estimate_agree(fake_cuda: FakeCuda) -> None:
    found = fake_cuda.call(estimated, JOB, 8)
    assert sum(found.memory.values()) == pytest.approx(found.peak_gib)
    assert found.tokens_per_second_per_gpu == pytest.approx(4 * 512 / found.step_seconds)
    assert found.fits and 0.0 < found.mfu < 1.0
    assert found.assumptions["matmul.bf16.peak_tflops"] == 989.4


@pytest.mark.full
def test_offloaded_weights_are_on_the_host(fake_cuda: FakeCuda) -> None:
    kept, offloaded = (
        fake_cuda.call(estimated, {**JOB, "training.enable_cpu_offload": offload}, 2) for offload in ("false", "true")
    )
    assert kept.host_gib < offloaded.host_gib
    assert offloaded.allocated_gib < kept.allocated_gib


def test_offloaded_activations_are_copied_beside_the_computation(fake_cuda: FakeCuda) -> None:
    settings = {**JOB, "activation_checkpoint.mode": "full"}
    kept, offloaded = (
        fake_cuda.call(estimated, {**settings, "activation_checkpoint.offload_share": share}, 2) for share in (0.0, 1.0)
    )
    inputs = 5 * 4 * 512 * 256 * 4  # of all blocks but the last, in fp32
    assert offloaded.host_gib - kept.host_gib == pytest.approx(inputs / 2**30, rel=0.01)
    copies = offloaded.seconds["copy to or from the host"]
    assert copies >= 2 * inputs / 25e9
    assert offloaded.step_seconds < kept.step_seconds + 0.5 * copies


def test_a_window_shortens_attention(fake_cuda: FakeCuda) -> None:
    """Of every second block, to the pairs of positions that it shows."""
    model = "{{dim = 256, n_layers = 6, n_heads = 8, n_kv_heads = 4, ffn_dim = 512{}}}"
    job = {**JOB, "training.seq_len": 2048, "data.document_mask": "true"}
    all_pairs, some = (
        fake_cuda.call(estimated, {**job, "model.args": model.format(window)}, 1, recipe="tiny").seconds
        for window in ("", ", window = 512")
    )
    visible = 512 / 2048 * (1 - 511 / 4096) / 0.5
    assert some["attention"] == pytest.approx(all_pairs["attention"] * (1 + visible) / 2, rel=0.01)


FAMILIES = ("gemma2", "gemma3", "gpt_oss", "granite", "mistral")
"""Capped scores, windows of some layers, sinks, a scale, and windows of all layers."""


@pytest.mark.parametrize("family", rows(FAMILIES, (), ("gpt_oss",)))
def test_families_of_transformers_have_an_estimate(fake_cuda: FakeCuda, tmp_path: Path, family: str) -> None:
    pytest.importorskip("titan_models_hf")
    one_device = {**settings_of(family, "one", None, tmp_path), "job.device": "cuda"}
    make_job("hf_debug", one_device, missing_ok=True)  # derived where no device is simulated, as `titan estimate` does
    found = fake_cuda.call(estimated, one_device, 1, recipe="hf_debug")
    assert found.seconds["attention"] > 0 and found.memory["parameters"] > 0


def test_accumulation_takes_longer_and_no_more_memory(fake_cuda: FakeCuda) -> None:
    batches = 8 * 4 * 2, 8 * 4 * 8  # whose logical shards do not divide a smaller batch
    two, eight = (
        fake_cuda.call(estimated, {**JOB, "training.global_batch_size": size, "data.logical_shards": size}, 8)
        for size in batches
    )
    assert eight.peak_gib == pytest.approx(two.peak_gib)
    assert 3.0 < eight.step_seconds / two.step_seconds < 4.0


P = "parallelism."
TWO_STAGES = {**JOB, P + "pipeline_parallel_degree": 2, P + "pipeline_parallel_schedule": "1F1B"}


@pytest.mark.parametrize(
    "settings",
    [
        {"training.global_batch_size": 4 * 4 * 8},
        pytest.param(
            {"training.global_batch_size": 4 * 4 * 8, P + "fsdp_reshard_after_forward": "never"}, marks=pytest.mark.long
        ),
        {**TWO_STAGES, "training.local_batch_size": 16},
        pytest.param(
            {**TWO_STAGES, "training.local_batch_size": 32, P + "pipeline_parallel_schedule": "Interleaved1F1B"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {**TWO_STAGES, "training.local_batch_size": 16, P + "pipeline_parallel_schedule": "InterleavedZeroBubble"},
            marks=pytest.mark.long,
        ),
    ],
    ids=["accumulation", "gathered once", "1F1B", "interleaved", "zero bubble"],
)
def test_a_few_microbatches_give_the_figures_of_all(fake_cuda: FakeCuda, settings: dict[str, object]) -> None:
    job = {**JOB, **settings}
    few, every = (fake_cuda.call(estimated, job, 4, every_microbatch=which) for which in (False, True))
    assert (few.assumptions["simulated microbatches"], every.assumptions["simulated microbatches"]) != ("all", "all")
    assert few.step_seconds == pytest.approx(every.step_seconds, rel=0.02)
    assert few.seconds["host"] == pytest.approx(every.seconds["host"], rel=0.02)
    # Weights' gradients that wait take some microbatches more to be as many as ever.
    assert few.allocated_gib == pytest.approx(every.allocated_gib, rel=0.05 if "ZeroBubble" in str(settings) else 0.01)
    counts = [{(one.operator, one.group): one.count for one in found.collectives} for found in (few, every)]
    assert counts[0] == pytest.approx(counts[1])


@pytest.mark.parametrize("schedule", rows(["GPipe", "LoopedBFS"], (), ()))
def test_schedules_that_keep_all_microbatches_need_memory_for_all(fake_cuda: FakeCuda, schedule: str) -> None:
    job = {**TWO_STAGES, P + "pipeline_parallel_schedule": schedule}
    eight, sixteen = (fake_cuda.call(estimated, {**job, "training.local_batch_size": count}, 2) for count in (8, 16))
    assert sixteen.memory["activations"] == pytest.approx(2 * eight.memory["activations"], rel=0.1)


@pytest.mark.long
def test_a_schedule_in_a_file_is_simulated_as_it_is(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    from titan_simulate.estimate.pipeline import one_forward_one_backward

    file = tmp_path / "schedule.csv"
    orders = [one_forward_one_backward(rank, 2, 16) for rank in range(2)]
    file.write_text("".join(",".join(f"{stage}{kind}{number}" for kind, stage, number in one) + "\n" for one in orders))
    job = {**TWO_STAGES, "training.local_batch_size": 16}
    named, given = (
        fake_cuda.call(estimated, {**job, **more}, 2) for more in ({}, {P + "pipeline_parallel_schedule_csv": str(file)})
    )
    assert given.assumptions["simulated microbatches"] == "all"
    assert given.step_seconds == pytest.approx(named.step_seconds, rel=0.02)
    assert given.allocated_gib == pytest.approx(named.allocated_gib, rel=0.02)


@pytest.mark.long
def test_stages_that_are_not_simulated_take_the_time_of_their_blocks(fake_cuda: FakeCuda) -> None:
    """The more so the more of them a pipeline has between its ends."""
    job = {**TWO_STAGES, P + "pipeline_parallel_degree": 4, "training.local_batch_size": 16}
    job["model.args"] = MODEL.replace("n_layers = 6", "n_layers = 8")
    cuts = '["layers.2", "layers.4", "layers.6"]', '["layers.1", "layers.4", "layers.7"]'
    even, uneven = (fake_cuda.call(estimated, {**job, P + "pipeline_parallel_split_points": cut}, 4) for cut in cuts)
    assert uneven.step_seconds > 1.25 * even.step_seconds


def matmuls_of_actions() -> dict[tuple[int, str], int]:
    """Return the floating-point operations of matmuls in zero-bubble stages of rank 0 of 2, by stage and action."""
    from titan_core.api.config.resolved import Override
    from titan_core.api.plugins.assembled_job import AssembledJob
    from titan_core.loop.training import train
    from titan_simulate.estimate.estimate import device_of
    from titan_simulate.estimate.traced_rank import take
    from titan_simulate.estimate.work import Kind
    from titan_simulate.hardware.read import read_machine

    job = {**TWO_STAGES, P + "pipeline_parallel_schedule": "InterleavedZeroBubble"}

    def job_of(more: Sequence[Override]) -> AssembledJob:
        return make_job("llama3_debug", {**job, **{one.key: one.text for one in more}}, 2, missing_ok=True)

    device = device_of(read_machine("h100"))
    found = take(job_of, train, 0, None, device, {}, lambda job: job, None, short=0, checks_model=False, repeating=0)
    total: Counter[tuple[int, str]] = Counter()
    for work in found.trace:
        if work.kind is Kind.MATMUL and work.action is not None:
            total[work.action[1], work.action[0]] += work.flops
    return dict(total)


def test_what_a_split_backward_pass_computes_is_known_by_action(fake_cuda: FakeCuda) -> None:
    found = fake_cuda.call(matmuls_of_actions)
    assert found.keys() == {(0, "F"), (0, "W"), (2, "F"), (2, "I"), (2, "W")}  # nobody needs gradients of tokens
    assert found[2, "I"] == found[2, "W"] == found[2, "F"]
    assert found[0, "W"] > found[0, "F"]


def test_the_reductions_of_a_job_are_assumptions(fake_cuda: FakeCuda) -> None:
    stages = {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "1F1B"}
    several = {**JOB, **stages, "training.local_batch_size": 16, "parallelism.enable_async_tensor_parallel": "true"}
    pipeline = fake_cuda.call(estimated, {**several, "parallelism.tensor_parallel_degree": 2, "compile.enable": "true"}, 4)
    assert pipeline.assumptions["simulated ranks"] == "0 and 3 of 4, for all"
    assert pipeline.assumptions["simulated microbatches"] == "4 of 16"
    assert pipeline.assumptions["factor of forward and backward"] == 4.0
    assert "12 operators" in pipeline.assumptions["asynchronous tensor parallelism"]
    one = fake_cuda.call(estimated, {**JOB, "training.global_batch_size": 8 * 4}, 8)
    assert (one.assumptions["simulated ranks"], one.assumptions["simulated microbatches"]) == ("0 of 8, for all", "all")
    assert one.assumptions["foreach operators"] == "a kernel for 64 tensors"


@pytest.mark.long
def test_compiled_code_is_faster(fake_cuda: FakeCuda) -> None:
    eager, compiled = (fake_cuda.call(estimated, {**JOB, "compile.enable": which}, 8) for which in ("false", "true"))
    assert compiled.seconds["pointwise"] < 0.8 * eager.seconds["pointwise"]
    assert compiled.step_seconds < eager.step_seconds


@pytest.mark.long
def test_all_blocks_are_simulated_where_a_transform_treats_them_by_number(fake_cuda: FakeCuda) -> None:
    every_second = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"}
    unequal, equal = (
        fake_cuda.call(estimated, {**JOB, "parallelism.fsdp_group_mib": 0, **settings}, 8) for settings in (every_second, {})
    )
    assert unequal.assumptions["simulated blocks"] == "all"
    assert equal.assumptions["simulated blocks"] != "all"


@pytest.mark.long
def test_what_a_ring_passes_on_takes_as_long_as_a_send(fake_cuda: FakeCuda) -> None:
    ring = {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_rotate_method": "alltoall"}
    found = fake_cuda.call(estimated, {**JOB, **ring}, 2)
    (passed,) = (one for one in found.collectives if "alltoall" in one.operator)
    assert passed.seconds == pytest.approx(passed.count * 11.5e-6 + passed.bytes / 360e9)
