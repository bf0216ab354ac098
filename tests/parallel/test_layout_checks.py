"""Divisions that cannot work are refused before launch, with numbers that would."""

from __future__ import annotations

import pytest

from harness.jobs import make_job
from titan_core.api.errors import UserError

TP, CP = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({TP: 3}, "8 heads and 4 key/value heads of .* must divide by it; 1, 2, 4 would work"),
        ({TP: 8}, "4 key/value heads of .* must divide by it; 1, 2, 4 would work"),
        ({TP: 2, "training.seq_len": 255}, "training.seq_len = 255: sequence parallelism divides it over 2 ranks; 254"),
        ({CP: 2, "training.seq_len": 250}, "a multiple of 2 x context-parallel degree 2 x .* 1 = 4; 248 or 252 would work"),
        ({CP: 2, TP: 4, "training.seq_len": 250}, "degree 2 x tensor-parallel degree 4 = 16; 240 or 256 would work"),
        ({CP: 8, "training.seq_len": 2047}, "= 16; 2032 or 2048 would work"),
        ({"activation_checkpoint.mode": "memory_budget"}, "torch.compile's inductor backend that keeps a budget"),
        ({TP: 2, "parallelism.enable_async_tensor_parallel": "true"}, "it is the compiler's doing"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(overrides: dict[str, object], message: str) -> None:
    ranks = int(str(overrides.get(TP, 1))) * int(str(overrides.get(CP, 1)))
    with pytest.raises(UserError, match=message):
        make_job("tiny", overrides, ranks)


def test_without_sequence_parallelism_any_length_that_context_parallelism_can_divide_will_do() -> None:
    overrides = {CP: 2, TP: 4, "training.seq_len": 252, "parallelism.disable_sequence_parallel": "true"}
    make_job("tiny", overrides, 8)
