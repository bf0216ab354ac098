"""A rank's use of its GPU, on a simulated one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.fake_cuda import FakeCuda

result = pytest.importorskip("titan_simulate.engine.result")

MODEL = {"model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}", "training.seq_len": 64}


def settings() -> dict[str, Any]:
    """Return what a rank finds and sets on its GPU."""
    from titan_core.toolkit.device import attention_kernels, choose_device
    from titan_launch.ranks.numa import _node_of

    os.environ["LOCAL_RANK"] = "1"
    torch.cuda.device_count = lambda: 1  # type: ignore[assignment]
    device = choose_device("auto")
    with attention_kernels(device):
        order = torch._C._get_sdp_priority_order()
    return {"device": str(device), "order": order, "node": _node_of(device, Path("/nowhere"))}


def test_a_rank_that_sees_one_gpu_uses_it(fake_cuda: FakeCuda) -> None:
    from torch.nn.attention import SDPBackend

    found = fake_cuda.run(settings)
    assert found["device"] == "cuda:0"
    first = [SDPBackend(int(kernel)) for kernel in found["order"][:2]]
    assert first == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    assert found["node"] is None  # no sysfs there


@pytest.mark.parametrize(("precision", "expected"), [("bfloat16", "bfloat16"), ("float32", "float32")])
def test_a_job_on_one_gpu_computes_in_the_type_of_its_recipe(fake_cuda: FakeCuda, precision: str, expected: str) -> None:
    found = fake_cuda.train("tiny", {**MODEL, "training.mixed_precision_param": precision}, strict=False)
    forward = next(phase for phase in found.steps[-1].phases if phase.name == "forward")
    matmuls = {piece.dtype for piece in forward.peak.allocations if piece.operator.endswith(("::mm", "::addmm"))}
    assert matmuls == {expected}
