"""How often ranks that divide a sequence exchange tensors for windows and sinks, on fake CUDA devices."""

from __future__ import annotations

import tempfile
from collections import Counter

import pytest

from harness.fake_cuda import FakeCuda
from harness.quick import rows
from harness.small_gpt import job_of, small

CP, HEADS = "parallelism.context_parallel_degree", "parallelism.context_parallel_heads_degree"
AC = "activation_checkpoint.mode"


def exchanged_by_options(overrides: dict[str, object], ranks: int) -> dict[str, int]:
    """Return how often ranks that divide a sequence exchange tensors in a step of a model with a window and sinks."""
    from titan_core.loop.training import train
    from titan_simulate.engine.simulate import SETTINGS, simulate

    with tempfile.TemporaryDirectory() as folder:
        settings = {"training.steps": 2, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}
        settings |= {"job.dump_folder": folder, "training.mixed_precision_param": "bfloat16", **SETTINGS, **overrides}
        job = job_of(small(attention=({"window": 6}, {"sinks": True})), settings, ranks)
        found = simulate(job, train, rank=1, strict=True)
    counts: Counter[str] = Counter()
    for one in found.steps[-1].collectives:
        if one.group.startswith("mesh_cp") and "wrap_tensor" not in one.operator:
            counts[one.operator.partition("::")[2]] += one.count
    return dict(counts)


OPTIONS: dict[str, tuple[int, dict[str, object], dict[str, int]]] = {
    # Windows: one exchange forward and one backward. Sinks: as in any ring.
    "CP 4": (8, {CP: 4}, {"all_to_all_single": 2, "_allgather_base_": 2, "_reduce_scatter_base_": 1}),
    "CP 4, full": (8, {CP: 4, AC: "full"}, {"all_to_all_single": 3, "_allgather_base_": 3, "_reduce_scatter_base_": 1}),
    "CP 4, selective": (
        8,
        {CP: 4, AC: "selective"},
        {"all_to_all_single": 2, "_allgather_base_": 2, "_reduce_scatter_base_": 1},
    ),
    "CP 2 by heads": (4, {CP: 2, HEADS: 2}, {"all_to_all_single": 8}),
    "CP 4, 2 by heads": (8, {CP: 4, HEADS: 2}, {"all_to_all_single": 10, "_allgather_base_": 2, "_reduce_scatter_base_": 1}),
}


@pytest.mark.parametrize("case", rows(OPTIONS, ("CP 4, selective", "CP 4, 2 by heads")))
def test_windows_and_sinks_are_divided_without_gathering_all_keys(fake_cuda: FakeCuda, case: str) -> None:
    ranks, overrides, expected = OPTIONS[case]
    assert fake_cuda.call(exchanged_by_options, overrides, ranks) == expected
