"""What Muon communicates. Its runs on meshes are in ``test_inherited_suites.py`` and ``test_example_suites.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import run_in

STEP: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 50}",
    "optimizer.name": "Muon",
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.steps": 1,
    "lr_scheduler.warmup_steps": 1,
    "job.device": "cpu",
}


def count_sent(folder: str, dtype: str) -> tuple[int, RunRecord]:
    """Return the bytes that this rank sends to others for the updates of one step of Muon, and the run."""
    sent, original = 0, dist.all_to_all_single

    def counting(output: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += given.nbytes  # without what stays on this rank
        return original(output, given, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        record = run_in(folder, {**STEP, "muon.dtype": dtype})
    return sent, record


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_rank_sends_its_shards_and_as_many_elements_of_updates(gloo: GlooPool, tmp_path: Path, dtype: str) -> None:
    """A step sends at most 1.1 times what FSDP sends for AdamW, one reduce-scatter and one all-gather of all parameters in
    fp32, and one copy of the matrices."""
    results = gloo.run(4, count_sent, str(tmp_path), dtype)
    sent, parameters = sum(sent for sent, _ in results), results[0][1].final
    hidden = sum(one.numel() for name, one in parameters.items() if name.startswith("layers") and one.dim() == 2)
    size = 4 if dtype == "float32" else 2
    # Three quarters of each matrix go to its owner, and three quarters of its update back. Each rank sends to three others.
    assert sent == 2 * 0.75 * hidden * size
    of_adamw = 2 * 3 * 4 * sum(one.numel() for one in parameters.values())
    assert of_adamw + sent <= 1.1 * (of_adamw + 4 * hidden)
