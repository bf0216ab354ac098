"""Parameters that compute in fp32 under mixed precision (``ModelLayout.exact``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fake_ranks import Operators, fake_ranks
from harness.objectives import first_step
from harness.small_gpt import BLOCKS, GAINS, Gain, job_of, small, train_model
from titan_core.api import Batch, JobMesh, hookimpl
from titan_core.model.build import build_parts
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import PP, TP

PARAM, REDUCE = "training.mixed_precision_param", "training.mixed_precision_reduce"
BFLOAT16: dict[str, object] = {PARAM: "bfloat16"}


@dataclass
class Forwards:
    """Records the type of each module's weight in its forward passes, and whether its values are those of bf16."""

    seen: dict[str, set[tuple[torch.dtype, bool]]] = field(default_factory=dict)

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        for part in run.parts:
            for name, module in part.named_modules():
                if isinstance(module, Gain | nn.Linear):
                    module.register_forward_pre_hook(lambda module, _, name=name: self._see(name, module.weight))

    def _see(self, name: str, weight: Tensor) -> None:
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        self.seen.setdefault(name, set()).add((weight.dtype, is_bfloat16(weight)))


def is_bfloat16(tensor: Tensor) -> bool:
    """Whether bf16 has all the values of ``tensor``."""
    return torch.equal(tensor.to(torch.bfloat16).to(tensor.dtype), tensor)


def train(folder: str, overrides: dict[str, object]) -> tuple[RunRecord, dict[str, set[tuple[torch.dtype, bool]]]]:
    brief = {"training.steps": 2, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}
    forwards = Forwards()
    return train_model(folder, small(gains=True), {**brief, **overrides}, [forwards]), forwards.seen


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
        job = job_of(small(gains=True), {**BFLOAT16, **overrides}, 2)
        (part,) = build_parts(job, JobMesh(job.mesh, "cpu"), torch.device("cpu"))
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        with Operators() as forward:
            loss = part.forward_loss(first_step(Batch(tokens, tokens)))
        with Operators() as backward:
            loss.backward()
    assert forward.collectives["_allgather_base_"] == gathers
    assert backward.collectives["_allgather_base_"] == again
    assert backward.collectives["_reduce_scatter_base_"] == gathers
