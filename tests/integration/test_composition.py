"""Jobs composed of traced blocks, against estimates of the same jobs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness.fake_cuda import why_not

_COMPARE = """
import json, sys
from benchmarks.composition import compared
print(json.dumps(compared(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
"""


@pytest.mark.full
@pytest.mark.fake_cuda
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.parametrize(
    ("recipe", "gpus", "degrees", "mode"),
    [
        ("llama3_1b", 8, {"data_parallel_shard": 8}, "none"),
        ("llama3_1b", 8, {"data_parallel_replicate": 2, "data_parallel_shard": 4}, "full"),
        ("llama3_1b", 8, {"data_parallel_shard": 2, "tensor_parallel": 4}, "selective"),
        ("llama3_1b", 8, {"data_parallel_shard": 2, "context_parallel": 4}, "none"),
        ("llama3_1b", 8, {"data_parallel_shard": 4, "pipeline_parallel": 2}, "none"),
        ("qwen3_30b_a3b", 16, {"data_parallel_shard": 8, "tensor_parallel": 2, "expert_parallel": 8}, "full"),
        ("qwen3_30b_a3b", 16, {"data_parallel_replicate": 2, "data_parallel_shard": 8, "expert_parallel": 2}, "none"),
    ],
    ids=["fsdp", "hsdp", "tp", "cp", "pp", "experts and tp", "experts and hsdp"],
)
def test_a_composed_job_takes_what_its_estimate_says(recipe: str, gpus: int, degrees: dict[str, int], mode: str) -> None:
    values = {f"parallelism.{name}_degree": degree for name, degree in degrees.items()} | {
        "activation_checkpoint.mode": mode
    }
    command = [sys.executable, "-c", _COMPARE, recipe, str(gpus), json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    time, memory = json.loads(done.stdout.splitlines()[-1])
    assert time == pytest.approx(1.0, abs=0.04)
    assert memory == pytest.approx(1.0, abs=0.12)
