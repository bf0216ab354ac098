"""Parameters that compute in fp32 under mixed precision (``ModelLayout.exact``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.fake_ranks import Operators, fake_ranks
from harness.gained_gpt import BFLOAT16, EXACT, GAINS, PARAM, REDUCE, Gained, is_bfloat16, train
from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.meshes import PP, TP
from harness.objectives import first_step
from harness.small_gpt import BLOCKS, definition, job_of
from titan_core.api import Batch, JobMesh
from titan_core.model.build import build_parts


@pytest.fixture(scope="module")
def in_fp32(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return gloo.run(1, train, str(tmp_path_factory.mktemp("fp32")), {})[0][0]


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (1, {}),
        (1, {"activation_checkpoint.mode": "full"}),
        (2, {}),
        (2, {"activation_checkpoint.mode": "full", "parallelism.fsdp_reshard_after_forward": "always"}),
        pytest.param(
            2, {"activation_checkpoint.mode": "selective", "parallelism.fsdp_group_mib": 0}, marks=pytest.mark.full
        ),
        (2, {PP: 2}),
        pytest.param(4, {TP: 2}, marks=pytest.mark.full),
        pytest.param(2, {"parallelism.data_parallel_replicate_degree": 2}, marks=pytest.mark.full),
        pytest.param(
            2, {"compile.enable": "true", "compile.backend": "eager", "compile.fullgraph": "false"}, marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_they_compute_in_fp32_and_all_others_in_bf16(
    gloo: GlooPool, tmp_path: Path, in_fp32: RunRecord, ranks: int, mesh: dict[str, object]
) -> None:
    """And train like fp32, within what bf16 loses elsewhere."""
    seen: dict[str, set[tuple[torch.dtype, bool]]] = {}
    for record, of_rank in gloo.run(ranks, train, str(tmp_path), {**BFLOAT16, **mesh}):
        seen |= of_rank
        assert record.losses == pytest.approx(in_fp32.losses, rel=5e-3)
        for name in record.gradients.keys() & {name.replace("*", str(index)) for name in GAINS for index in range(BLOCKS)}:
            expected = in_fp32.gradients[name]
            assert (record.gradients[name] - expected).norm() < 0.05 * expected.norm(), name
    assert len(seen) == BLOCKS * (2 + 6) + 1
    for name, values in seen.items():
        exact = name.endswith(("first", "last"))
        assert values == ({(torch.float32, False)} if exact else {(torch.bfloat16, True)}), name


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_their_gradients_are_summed_in_fp32(gloo: GlooPool, tmp_path: Path, param: str) -> None:
    for record, _ in gloo.run(2, train, str(tmp_path), {PARAM: param, REDUCE: "bfloat16"}):
        for name, gradient in record.gradients.items():
            assert is_bfloat16(gradient) is not name.endswith(("first.weight", "last.weight")), name


@pytest.mark.parametrize(
    ("overrides", "gathers", "again"),
    [
        ({}, 1 + BLOCKS, 0),
        ({"parallelism.fsdp_reshard_after_forward": "always"}, 1 + BLOCKS, 1 + BLOCKS),
        # Embedding, norm and output, blocks; what computes in fp32 is small, and stays.
        ({"parallelism.fsdp_group_mib": 0.001}, 2 + 2 * BLOCKS, 1 + BLOCKS),
    ],
    ids=str,
)
def test_those_of_a_block_are_gathered_together(overrides: dict[str, object], gathers: int, again: int) -> None:
    with fake_ranks(2):
        job = job_of(definition(Gained, EXACT), {**BFLOAT16, **overrides}, 2)
        (part,) = build_parts(job, JobMesh(job.mesh, "cpu"), torch.device("cpu"))
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        with Operators() as forward:
            loss = part.forward_loss(first_step(Batch(tokens, tokens)))
        with Operators() as backward:
            loss.backward()
    assert forward.collectives["_allgather_base_"] == gathers
    assert backward.collectives["_allgather_base_"] == again
    assert backward.collectives["_reduce_scatter_base_"] == gathers
