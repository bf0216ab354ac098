"""Predictions against published runs (benchmarks/published)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pytest

from harness.fake_cuda import FakeCuda
from titan_testing.jobs import make_job

pytest.importorskip("titan_simulate")

from benchmarks.published.errors import Compared, table_of_errors
from benchmarks.published.estimated import UNCOMPILED_LOSS, as_published, assemble_row, predict, with_flash_attention
from benchmarks.published.row import TORCHTITAN, Row, job
from benchmarks.published.rows import EXPERTS, ROWS
from titan_simulate.hardware.read import read_machine

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate

NAMES = ("8b-8-eager", "8b-8-compile", "8b-8-float8", "70b-float8", "70b-async")
JOB = {
    "training.seq_len": 512,
    "training.local_batch_size": 4,
    "training.global_batch_size": -1,
    "training.mixed_precision_param": "bfloat16",
    "parallelism.fsdp_group_mib": 0.0,
}


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in NAMES], ids=lambda row: row.name)
def test_memory_within_15_percent_and_speed_within_20(row: Row) -> None:
    found = predict(row)
    assert found["reserved_gib"] == pytest.approx(row.gib, rel=0.15)
    assert found["peak_gib"] == pytest.approx(row.gib, rel=0.15)
    assert found["tokens_per_second_per_gpu"] == pytest.approx(row.tokens, rel=0.2)


def estimated(settings: Mapping[str, object], world_size: int, published: bool) -> Estimate:
    """Estimate ``llama3_debug`` in this process, in which CUDA is simulated, as Titan or as the published runs train it."""
    from titan_core.api.config.resolved import Override
    from titan_core.api.plugins.assembled_job import AssembledJob
    from titan_core.loop.training import train
    from titan_simulate.estimate.estimate import estimate

    settings = {**settings, **(UNCOMPILED_LOSS if published else {})}

    def job_of(more: Sequence[Override]) -> AssembledJob:
        return make_job("llama3_debug", {**settings, **{one.key: one.text for one in more}}, world_size, missing_ok=True)

    machine = read_machine("h100")
    if not published:
        return estimate(job_of, train, machine)
    return estimate(job_of, train, with_flash_attention(machine), change=partial(as_published, TORCHTITAN))


def test_full_logits_need_more_memory(fake_cuda: FakeCuda) -> None:
    narrow = "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}"
    job = {**JOB, "model.args": narrow, "training.local_batch_size": 64, "compile.enable": "false"}
    own, full = (fake_cuda.call(estimated, job, 8, which) for which in (False, True))
    assert full.peak_gib > own.peak_gib
    assert set(full.memory) == set(own.memory)


def test_published_runs_used_flash_attention() -> None:
    h100 = read_machine("h100")
    flash = with_flash_attention(h100)
    assert flash.attention.kernel == "flash" and flash.attention.flash is None
    assert (flash.attention.forward_tflops, flash.attention.backward_tflops, flash.attention.causal) == (370.0, 318.0, 0.9)
    assert flash.model_copy(update={"attention": h100.attention}) == h100
    assert with_flash_attention(read_machine("a100")) == read_machine("a100")


def test_the_ring_of_published_runs_passes_all_heads_on_and_nothing_hides_it(fake_cuda: FakeCuda) -> None:
    ranks = 4
    job = {
        **JOB, "model.args": "{dim = 256, n_layers = 6, n_heads = 8, n_kv_heads = 4, ffn_dim = 512}",
        "parallelism.context_parallel_degree": ranks, "activation_checkpoint.mode": "full", "compile.enable": "true",
    }  # fmt: skip
    found = fake_cuda.call(estimated, job, 2 * ranks, True)
    passed = {one.operator: one for one in found.collectives if one.ranks == ranks}
    layers, all_heads = 6, 4 * 512 * 256  # elements of keys, and of values, with a head for each of 8 query heads
    gathers, rings = passed["c10d::_allgather_base_"], passed["c10d::alltoall_base_"]
    assert (gathers.count, rings.count) == (3 * layers, ranks * layers)
    assert gathers.bytes == 3 * layers * 2 * all_heads * 2  # bf16, of all ranks
    assert rings.bytes == ranks * layers * 2 * all_heads // ranks * 4  # fp32, of one rank
    for one in (gathers, rings):
        assert one.exposed_seconds == pytest.approx(one.seconds)


def test_errors_are_listed_by_kind_and_trainer() -> None:
    def compared(ratio: float, mesh: str, experts: bool = False, **settings: object) -> Compared:
        return Compared(Row(f"ratio {ratio}", "llama3_8b", 8, job(**settings), 1.0), mesh, ratio, experts)

    found = [
        compared(1.1, "dp_shard=8"),
        compared(0.5, "dp_shard=8", length=65536),
        compared(1.2, "pp=2 x dp_shard=2 x tp=2", float8=True),
        compared(1.25, "dp_shard=8, ep=8", experts=True),
    ]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in table_of_errors(found).splitlines()[2:]]
    assert {row[0]: row[1:] for row in table} == {
        "dense, data parallel only": ["2", "0.80", "1.55", "2.00", "0.50 (ratio 0.5)"],
        "long context": ["1", "0.50", "2.00", "2.00", "0.50 (ratio 0.5)"],
        "tensor parallel": ["1", "1.20", "1.20", "1.20", "1.20 (ratio 1.2)"],
        "pipeline": ["1", "1.20", "1.20", "1.20", "1.20 (ratio 1.2)"],
        "float8": ["1", "1.20", "1.20", "1.20", "1.20 (ratio 1.2)"],
        "experts": ["1", "1.25", "1.25", "1.25", "1.25 (ratio 1.25)"],
        "by TorchTitan": ["4", "1.15", "1.23", "2.00", "0.50 (ratio 0.5)"],
        "all": ["4", "1.15", "1.23", "2.00", "0.50 (ratio 0.5)"],
    }


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row in ROWS for row in EXPERTS)


@pytest.mark.full
def test_every_row_is_a_job_on_a_machine() -> None:
    for row in ROWS:
        read_machine(row.device)
        assert assemble_row(row).mesh.world_size == row.ranks
