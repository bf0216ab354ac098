"""A rank never holds more than its share of the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_core.loop import trainer, training
from titan_core.loop.world import join_world
from titan_core.model import build
from titan_core.model.build import build_parts
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job

STEP: dict[str, object] = {"training.steps": 1, "training.seq_len": 64, "job.device": "cpu"}


def bytes_held(folder: str) -> int:
    """Train one step; return the bytes of parameters, gradients and optimizer state on this rank."""
    os.chdir(folder)
    sizes: list[int] = []

    class Measured(trainer.Trainer):
        def _train_step(self, *arguments: Any) -> Any:
            compute = self.run_step

            def and_count(*arguments: Any) -> torch.Tensor:
                loss = compute(*arguments)
                sizes.append(sum(map(local_bytes, self.parameters)))
                sizes.append(sum(local_bytes(p.grad) for p in self.parameters if p.grad is not None))
                return loss

            self.run_step = and_count  # type: ignore[assignment]
            report = super()._train_step(*arguments)
            states = self.state.optimizer.state.values()
            sizes.append(sum(local_bytes(value) for state in states for value in state.values() if torch.is_tensor(value)))
            return report

    original, training.Trainer = trainer.Trainer, Measured  # type: ignore[misc]
    try:
        training.train(make_job("tiny", STEP))
    finally:
        training.Trainer = original  # type: ignore[misc]
    parameters, gradients, state = sizes
    assert parameters == gradients
    assert state >= 2 * parameters
    return parameters + gradients + state


def local_bytes(tensor: torch.Tensor) -> int:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.numel() * tensor.element_size()


def test_parameters_gradients_and_optimizer_state_are_divided_by_fsdp(gloo: GlooPool, tmp_path: Path) -> None:
    (whole,) = gloo.run(1, bytes_held, str(tmp_path))
    assert max(gloo.run(4, bytes_held, str(tmp_path))) <= 0.27 * whole


class Largest(TorchDispatchMode):
    """Records the largest allocation outside the meta device, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(keywords or {}))
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, torch.Tensor) and not isinstance(output, DTensor) and output.device.type != "meta":
                self.bytes = max(self.bytes, output.untyped_storage().nbytes())
        return result


def largest_allocation(overrides: dict[str, object]) -> int:
    job = make_job("tiny", {**STEP, **overrides})
    # Skips the trial of a small copy, whose logits of a few tokens would be the largest tensor.
    with pytest.MonkeyPatch.context() as patch, join_world(job) as world, Largest() as largest:
        patch.setattr(build, "try_model", lambda *_: None)
        build_parts(job, world.mesh, world.device)
    return largest.bytes


@pytest.mark.full
def test_no_rank_allocates_more_of_a_large_embedding_than_its_shard(gloo: GlooPool) -> None:
    rows, width = 600_000, 128
    large = {"model.args": f"{{vocab_size = {rows}}}"}
    whole = rows * width * 4
    for degree in (1, 2):
        overrides = {**large, "parallelism.tensor_parallel_degree": degree}
        for allocated in gloo.run(4, largest_allocation, overrides):
            assert whole // 4 <= allocated <= whole // 4 * 1.01
