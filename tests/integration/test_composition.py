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
print(json.dumps(compared("llama3_1b", 8, json.loads(sys.argv[1]))))
"""

P = "parallelism."


@pytest.mark.full
@pytest.mark.fake_cuda
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.parametrize(
    "values",
    [
        {P + "data_parallel_shard_degree": 8, "activation_checkpoint.mode": "none"},
        {P + "data_parallel_replicate_degree": 2, P + "data_parallel_shard_degree": 4, "activation_checkpoint.mode": "full"},
        {P + "data_parallel_shard_degree": 2, P + "tensor_parallel_degree": 4, "activation_checkpoint.mode": "selective"},
        {P + "data_parallel_shard_degree": 2, P + "context_parallel_degree": 4, "activation_checkpoint.mode": "none"},
        {P + "data_parallel_shard_degree": 4, P + "pipeline_parallel_degree": 2, "activation_checkpoint.mode": "none"},
    ],
    ids=["fsdp", "hsdp", "tp", "cp", "pp"],
)
def test_a_composed_job_takes_what_its_estimate_says(values: dict[str, object]) -> None:
    command = [sys.executable, "-c", _COMPARE, json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    time, memory = json.loads(done.stdout.splitlines()[-1])
    assert time == pytest.approx(1.0, abs=0.06)
    assert memory == pytest.approx(1.0, abs=0.12)
