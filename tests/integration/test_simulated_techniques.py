"""Every technique once on fake CUDA tensors: its CUDA branches run, and the step is sound as far as shapes and waits show.

Two steps of a small Llama as one rank of a large world. Numbers do not exist here; the suites on gloo compare those.
"""

from __future__ import annotations

import json
from contextlib import nullcontext, redirect_stdout
from importlib.metadata import version
from io import StringIO

import pytest
from packaging.version import Version

from harness import small_gpt
from harness.fake_cuda import FakeCuda
from harness.quick import quick_rows
from harness.unusual_gpts import JOINT, joint_norms
from titan_core.api import UserError
from titan_core.cli.main import main

pytest.importorskip("titan_simulate")

from titan_core.loop.training import train
from titan_simulate.engine.result import SimulatedRank
from titan_simulate.engine.simulate import simulate

LLAMA: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 4, n_heads = 8, n_kv_heads = 4, ffn_dim = 128}",
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": -1,
    "training.mixed_precision_param": "bfloat16",
}
P = "parallelism."
TP2, TP4 = ({P + "tensor_parallel_degree": degree} for degree in (2, 4))
FULL = {"activation_checkpoint.mode": "full"}
OFFLOAD = {"activation_checkpoint.offload_share": 1.0}
DOCUMENTS = {"data.document_mask": "true"}
FLOAT8 = {"float8.enable": "true"}


def pipeline(schedule: str) -> dict[str, object]:
    return {P + "pipeline_parallel_degree": 2, P + "pipeline_parallel_schedule": schedule}


TECHNIQUES = [
    pytest.param(1, 0, {}, id="one device"),
    pytest.param(256, 200, {}, id="FSDP"),
    pytest.param(256, 17, {P + "data_parallel_replicate_degree": 32}, id="HSDP"),
    pytest.param(64, 63, {P + "data_parallel_replicate_degree": 64, P + "data_parallel_shard_degree": 1}, id="DDP"),
    pytest.param(128, 5, TP4, id="TP, SP, loss parallel, FSDP"),
    pytest.param(
        4, 3, {**TP4, P + "disable_sequence_parallel": "true", P + "disable_loss_parallel": "true"}, id="TP alone"
    ),
    pytest.param(
        4, 0, {**TP4, P + "enable_async_tensor_parallel": "true", "compile.enable": "true"}, id="asynchronous TP"
    ),
    pytest.param(2, 0, pipeline("GPipe"), id="GPipe"),
    pytest.param(64, 63, pipeline("1F1B"), id="1F1B"),
    pytest.param(2, 1, {**pipeline("1F1B"), "model.args.tie_embeddings": "true"}, id="1F1B, tied"),
    pytest.param(2, 0, {**pipeline("ZBVZeroBubble"), "model.args.tie_embeddings": "true"}, id="ZBV, tied"),
    pytest.param(2, 1, pipeline("Interleaved1F1B"), id="Interleaved1F1B"),
    pytest.param(2, 0, pipeline("InterleavedZeroBubble"), id="InterleavedZeroBubble"),
    pytest.param(2, 1, pipeline("ZBVZeroBubble"), id="ZBVZeroBubble"),
    pytest.param(8, 0, {P + "context_parallel_degree": 4}, id="CP"),
    pytest.param(
        4, 3, {P + "context_parallel_degree": 4, P + "context_parallel_rotate_method": "alltoall"},
        id="CP, all-to-all",
    ),
    pytest.param(4, 3, {P + "context_parallel_degree": 4, **DOCUMENTS}, id="CP with documents"),
    pytest.param(2, 0, DOCUMENTS, id="documents"),
    pytest.param(64, 5, {**TP4, **OFFLOAD}, id="TP, activations in host memory"),
    pytest.param(2, 1, {**pipeline("1F1B"), **FULL, **OFFLOAD}, id="1F1B, recomputed, activations in host memory"),
    pytest.param(
        512, 511,
        {**TP4, **FULL, P + "pipeline_parallel_degree": 2, P + "context_parallel_degree": 2},
        id="4D at 512 ranks",
    ),
    pytest.param(
        512, 300,
        {**TP4, **FULL, **DOCUMENTS, P + "pipeline_parallel_degree": 2, P + "context_parallel_degree": 2},
        id="4D with documents at 512 ranks",
    ),
    pytest.param(64, 63, {**pipeline("1F1B"), **DOCUMENTS}, id="1F1B with documents"),
    pytest.param(
        2, 0, {**pipeline("InterleavedZeroBubble"), **DOCUMENTS, "activation_checkpoint.mode": "selective"},
        id="InterleavedZeroBubble with documents",
    ),
    pytest.param(2, 0, FULL, id="full recomputation"),
    pytest.param(2, 0, {"activation_checkpoint.mode": "selective"}, id="selective recomputation"),
    pytest.param(
        2, 0, {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
        id="recomputation of every second block",
    ),
    pytest.param(4, 0, {"activation_checkpoint.mode": "selective", **TP4}, id="selective recomputation, TP"),
    pytest.param(
        64, 9,
        {**FLOAT8, "float8.enable_fsdp_float8_all_gather": "true",
         "float8.precompute_float8_dynamic_scale_for_fsdp": "true"},
        id="float8, gathered in float8",
    ),
    pytest.param(
        4, 0,
        {**FLOAT8, **TP4, "model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 4, ffn_dim = 128}"},
        id="float8, TP",
    ),
    pytest.param(2, 0, {**FLOAT8, "float8.recipe_name": "rowwise"}, id="float8 rowwise"),
    pytest.param(2, 0, {"training.global_batch_size": 8}, id="accumulation"),
    pytest.param(
        2, 1,
        {"validation.enable": "true", "validation.dataset": "stdlib", "validation.freq": 1, "validation.steps": 1},
        id="validation",
    ),
    pytest.param(2, 0, {"training.enable_cpu_offload": "true"}, id="CPU offload"),
    pytest.param(2, 0, {"optimizer.implementation": "fused"}, id="fused AdamW"),
    pytest.param(2, 0, {"optimizer.implementation": "foreach"}, id="foreach AdamW"),
]  # fmt: skip
QUICK = ("TP, SP, loss parallel, FSDP", "Interleaved1F1B", "4D with documents at 512 ranks", "float8, gathered in float8")


@pytest.mark.parametrize(("world_size", "rank", "overrides"), quick_rows(TECHNIQUES, QUICK))
def test_runs_on_cuda(fake_cuda: FakeCuda, world_size: int, rank: int, overrides: dict[str, object]) -> None:
    found = fake_cuda.train("llama3_debug", {**LLAMA, **overrides}, world_size, rank, strict=False)
    first, second = found.steps
    assert 0 < first.peak.bytes <= second.peak.bytes, "the second step has the optimizer's state too"
    assert second.flops > 0 and second.launches > 0
    grown = second.phases[-1].live - first.phases[-1].live
    assert grown < 8192, "tensors pile up from step to step"


MOE: dict[str, object] = {
    "model.args": "{dim = 64, expert_dim = 64}",
    **{key: value for key, value in LLAMA.items() if key != "model.args"},
    P + "expert_parallel_degree": 4,
}


@pytest.mark.parametrize(
    ("world_size", "rank", "overrides"),
    [
        pytest.param(64, 9, {}, id="EP x FSDP"),
        pytest.param(64, 63, {**TP4, **pipeline("1F1B"), "activation_checkpoint.mode": "selective"}, id="EP x TP x PP"),
    ],
)
def test_experts_run_on_cuda(
    fake_cuda: FakeCuda, experts: str, world_size: int, rank: int, overrides: dict[str, object]
) -> None:
    found = fake_cuda.train("moe", {**MOE, **overrides}, world_size, rank, strict=False, site=experts)
    called = {one.operator for one in found.steps[-1].collectives if one.ranks == 4 and one.device == "cuda"}
    assert any("all_to_all" in name or "alltoall" in name for name in called), called


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    quick_rows(
        [
            pytest.param(8, {}, id="FSDP"),
            pytest.param(4, TP4, id="TP"),
            pytest.param(2, {**pipeline("1F1B"), "model.args.tie_embeddings": "true"}, id="1F1B, tied"),
            pytest.param(2, {**FLOAT8, "float8.enable_fsdp_float8_all_gather": "true"}, id="float8"),
            pytest.param(2, {"training.global_batch_size": 8}, id="accumulation"),
        ],
        ["float8"],
    ),
)
def test_the_host_does_not_wait_in_a_step_that_is_not_logged(
    fake_cuda: FakeCuda, world_size: int, overrides: dict[str, object]
) -> None:
    found = fake_cuda.train("llama3_debug", {**LLAMA, **overrides, "training.steps": 3}, world_size)
    assert found.steps[1].waits == ()


def norms_over_all_heads() -> SimulatedRank:
    job = small_gpt.job_of(small_gpt.definition(joint_norms, JOINT), {**TP2, "training.steps": 3, "job.device": "cuda"}, 2)
    return simulate(job, train)


def test_norms_over_all_heads_run_on_cuda(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.call(norms_over_all_heads).steps[1].waits == ()


def test_mxfp8_runs_on_a_blackwell_or_names_the_packages_that_do_not_fit(fake_cuda: FakeCuda) -> None:
    fits = Version(version("torchao")) > Version("0.18") or Version(version("triton")) < Version("3.9")
    why = "package torchao: its MX kernels cannot be imported .*install torchao above 0.18"
    with nullcontext() if fits else pytest.raises(UserError, match=why):
        fake_cuda.train("llama3_debug", {**LLAMA, "mx.enable": "true"}, 2, strict=False, device="NVIDIA B200")


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, TP2, {"mx.recipe_name": "nvfp4_wgrad_with_hp"}], ids=str)
def test_nvfp4_multiplies_4_bits_on_a_blackwell(fake_cuda: FakeCuda, settings: dict[str, object]) -> None:
    """Without waiting for the device, and with as many operations as in bf16, beside those of the Hadamard matrix."""
    plain = {**LLAMA, "training.mixed_precision_param": "bfloat16"}
    low = {"mx.enable": "true", "mx.recipe_name": "nvfp4", **settings}
    found = fake_cuda.train("llama3_debug", {**plain, **low}, 2, device="NVIDIA B200")
    expected = fake_cuda.train("llama3_debug", {**plain, **settings}, 2, device="NVIDIA B200")
    for mine, theirs in zip(found.steps[-1].phases, expected.steps[-1].phases, strict=True):
        more = 1.0 if mine.name != "backward" or "mx.recipe_name" in settings else 1.2
        assert theirs.flops <= mine.flops <= more * theirs.flops, mine.name


def simulated(*arguments: str) -> str:
    """Return what ``titan simulate`` prints, called in this process."""
    with redirect_stdout(StringIO()) as out:
        assert main(["simulate", "llama3_debug", *arguments]) == 0
    return out.getvalue()


def test_a_command_simulates_one_rank_of_each_stage(fake_cuda: FakeCuda) -> None:
    stages = (
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--world-size",
        "4",
        "--rank",
        "stages",
        "--steps",
        "1",
        "--json",
    )
    first, last = json.loads(fake_cuda.call(simulated, *stages))
    assert (first["rank"], last["rank"]) == (0, 2) and first["mesh"] == last["mesh"] == "pp=2 x dp_shard=2"
    assert last["steps"][0]["phases"][0]["peak"]["owners"]["logits and loss"] > 0
