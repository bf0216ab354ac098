"""Ranks that share one GPU train as one rank does: every parallelism on CUDA tensors, with gloo in NCCL's place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from harness.on_device import train_on
from harness.shared_gpu import lacking, train_sharing
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import CP, DR, PP, SCHEDULE, TP, require_equal

pytestmark = pytest.mark.gpu

FSDP_OPS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass(frozen=True)
class Case:
    """A mesh, with the collectives that it needs."""

    overrides: dict[str, object]
    needs: tuple[str, ...] = FSDP_OPS
    ranks: int = 2


FOUR_MICROBATCHES: dict[str, object] = {"training.local_batch_size": 4, "training.global_batch_size": 4}
CASES = {
    "FSDP": Case({"training.local_batch_size": 2}),
    "DDP": Case({DR: 2, "training.local_batch_size": 2}, ("all_reduce", "broadcast")),
    "HSDP 2x2": Case({DR: 2, "training.local_batch_size": 1}, ranks=4),
    "TP": Case({TP: 2}),
    "TP without SP": Case({TP: 2, "parallelism.disable_sequence_parallel": "true"}),
    "TP without loss parallelism": Case({TP: 2, "parallelism.disable_loss_parallel": "true"}),
    "PP, 1F1B": Case({**FOUR_MICROBATCHES, PP: 2, SCHEDULE: "1F1B"}, ("all_reduce", "broadcast")),
    "PP, ZBVZeroBubble": Case(
        {**FOUR_MICROBATCHES, PP: 2, SCHEDULE: "ZBVZeroBubble", "model.args.n_layers": 4}, ("all_reduce", "broadcast")
    ),
    "FSDP, selective recomputation": Case({"training.local_batch_size": 2, "activation_checkpoint.mode": "selective"}),
    "FSDP x TP": Case({TP: 2, "training.local_batch_size": 2}, ranks=4),
    "CP": Case({CP: 2}),
    "CP, alltoall": Case(
        {CP: 2, "parallelism.context_parallel_rotate_method": "alltoall"}, (*FSDP_OPS, "all_to_all_single")
    ),
    "CP, document masks": Case({CP: 2, "data.document_mask": "true"}),
}


@pytest.fixture(scope="module")
def missing(gloo: GlooPool) -> Callable[[torch.device], dict[str, str]]:
    """The collectives that gloo lacks for a device, with torch's messages."""
    return functools.cache(lambda device: gloo.run(2, lacking, device.type)[0])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranks_on_one_gpu_train_as_one(
    device: torch.device,
    gloo: GlooPool,
    in_tmp: Path,
    missing: Callable[[torch.device], dict[str, str]],
    case: Case,
) -> None:
    for name, why in missing(device).items():
        if name in case.needs:
            # The ranks share one GPU, which NCCL refuses; gloo supports only some collectives for CUDA tensors.
            pytest.skip(f"gloo of torch {torch.__version__} lacks {name} for {device.type} tensors: {why}")
    own = ("parallelism.", "training.local_batch_size", "activation_checkpoint.")
    one: RunRecord = train_on(device, {key: value for key, value in case.overrides.items() if not key.startswith(own)})
    records = gloo.run(case.ranks, train_sharing, str(in_tmp), device.type, {**case.overrides, "job.dump_folder": "shared"})
    require_equal(records, one)


@pytest.mark.full
def test_gloo_has_every_collective_on_the_cpu(gloo: GlooPool) -> None:
    """The probe reports what is missing and nothing else."""
    assert gloo.run(2, lacking, "cpu") == [{}, {}]
