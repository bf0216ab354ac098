"""Memory and communication of simulated ranks, against a computation by hand."""

from __future__ import annotations

import pytest

from harness.fake_cuda import FakeCuda

simulated = pytest.importorskip("titan_simulate.engine.result")
Owner = simulated.Owner

DIM, LAYERS, HEADS, KV_HEADS, FFN, VOCABULARY, SEQ, BATCH = 64, 4, 8, 8, 128, 288, 64, 2
LLAMA: dict[str, object] = {
    "model.args": f"{{dim = {DIM}, n_layers = {LAYERS}, n_heads = {HEADS}, n_kv_heads = {KV_HEADS}, ffn_dim = {FFN}}}",
    "training.seq_len": SEQ,
    "training.local_batch_size": BATCH,
    "training.global_batch_size": -1,
}
MATRICES = 2 * DIM * DIM + 2 * DIM * DIM * KV_HEADS // HEADS + 3 * DIM * FFN
NORMS = 2 * DIM
BLOCK = MATRICES + NORMS
EMBEDDING = VOCABULARY * DIM
WHOLE = LAYERS * BLOCK + 2 * EMBEDDING + DIM

P = "parallelism."


@pytest.mark.full
def test_bf16_parameters_are_gathered_in_half_the_bytes(fake_cuda: FakeCuda) -> None:
    gathered = {}
    for dtype in ("float32", "bfloat16"):
        found = fake_cuda.train(
            "llama3_debug", {**LLAMA, "training.mixed_precision_param": dtype}, world_size=8, strict=False
        )
        gathers = [one for one in found.steps[-1].collectives if "_allgather_base_" in one.operator]
        gathered[dtype] = sum(one.bytes for one in gathers if one.phase == "forward")
        assert all(one.ranks == 8 and one.device == "cuda" for one in gathers)
    # Embedding, each block and head are gathered in forward; the last norm belongs to the head's unit or the root.
    assert gathered == {"float32": 4 * WHOLE, "bfloat16": 2 * WHOLE}


@pytest.mark.full
def test_the_70b_recipe_needs_at_most_28_gib(fake_cuda: FakeCuda) -> None:
    def peak(layers: int) -> int:
        overrides = {"compile.enable": "false", "model.args": f"{{n_layers = {layers}}}"}
        found = fake_cuda.train("llama3_70b", overrides, 256, strict=False)
        return max(phase.peak.bytes for phase in found.steps[-1].phases)

    two, four = peak(2), peak(4)
    assert four + 76 * (four - two) / 2 < 28 * 2**30  # the other 76 of 80 blocks add the same each


def test_flops_are_those_of_the_formula(fake_cuda: FakeCuda) -> None:
    found = fake_cuda.train("llama3_debug", LLAMA, strict=False)
    tokens = SEQ * BATCH
    # 6 per weight of a matmul and token; attention: 4 x dim x seq per token and layer forward, 2.5 times that backward.
    matmuls = 6 * (WHOLE - EMBEDDING - DIM - LAYERS * NORMS) * tokens
    attention = LAYERS * 4 * DIM * SEQ * tokens
    assert found.steps[-1].flops == pytest.approx(matmuls + 3.5 * attention, rel=0.01)
    assert all(step.garbage == 0 for step in found.steps), "tensors in reference cycles"


def test_no_tensor_of_all_logits_exists(fake_cuda: FakeCuda) -> None:
    found = fake_cuda.train("llama3_debug", {**LLAMA, "training.seq_len": 512, "objective.chunk_tokens": 64}, strict=False)
    logits = [one for one in found.peak.allocations if one.owner is Owner.LOSS]
    assert all(one.bytes <= 64 * VOCABULARY * 4 * 2 for one in logits)
    assert max(found.peak.allocations, key=lambda one: one.bytes).owner is not Owner.LOSS


def test_offloaded_parameters_and_optimizer_state_are_on_the_host(fake_cuda: FakeCuda) -> None:
    found = fake_cuda.train("llama3_debug", {**LLAMA, "training.enable_cpu_offload": "true"}, world_size=8, strict=False)
    assert not found.resident.get(Owner.PARAMETERS) and not found.resident.get(Owner.OPTIMIZER)
    assert found.on_host >= 3 * 4 * WHOLE // 8


@pytest.mark.full
def test_every_rank_of_512_in_four_dimensions_sends_what_its_degree_needs(fake_cuda: FakeCuda) -> None:
    degrees = {"tensor_parallel_degree": 8, "pipeline_parallel_degree": 4, "data_parallel_replicate_degree": 2}
    overrides = {
        **LLAMA,
        "training.local_batch_size": 4,
        **{P + key: value for key, value in degrees.items()},
        P + "pipeline_parallel_schedule": "1F1B",
    }
    found = fake_cuda.train("llama3_debug", {**overrides, "activation_checkpoint.mode": "full"}, 512, rank=511, strict=False)
    ranks = {one.group: one.ranks for one in found.steps[-1].collectives}
    assert ranks["mesh_tp"] == 8
    assert ranks["default_pg"] == 512


VALIDATION = {"validation.enable": "true", "validation.dataset": "stdlib", "validation.freq": 1000, "validation.steps": 1}


def test_what_follows_a_step_is_no_part_of_it(fake_cuda: FakeCuda) -> None:
    """Validation, and the sample that the recipe shows when it ends."""
    settings = {"training.steps": 3, **VALIDATION}
    steps = fake_cuda.train("llama3_debug", settings).steps
    assert steps[-1].flops == steps[-2].flops > 0
    assert steps[-1].phase("between steps").flops > 0
