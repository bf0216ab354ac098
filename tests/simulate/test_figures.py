"""The figures of a simulation, against a computation by hand."""

from __future__ import annotations

import pytest

from harness.fake_cuda import FakeCuda

result = pytest.importorskip("titan_simulate.engine.result")

MODEL = {"model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}", "training.seq_len": 64}


def test_adam_keeps_two_values_per_weight_and_one_step_per_parameter(fake_cuda: FakeCuda) -> None:
    found = fake_cuda.train("tiny", MODEL, strict=False)
    weights = found.resident[result.Owner.PARAMETERS]
    blocks = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    assert weights > 4 * blocks
    assert 0 < found.resident[result.Owner.OPTIMIZER] - 2 * weights < 4 * 40
