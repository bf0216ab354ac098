"""Dumps of the flight recorder on a mesh with several parallelisms: see ``tests/debug/test_flight_recorder.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness.flights import FLIGHT, PATIENT, analysed, asks
from titan_core.api import hookimpl
from titan_debug.flight.collect import collectives_per_step
from titan_debug.flight.dump import read_dumps
from titan_debug.request import send_request
from titan_debug.torch_private import flight_recorder_entries
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, make_job


@pytest.mark.full
def test_a_healthy_job_dumps_on_request_and_shows_no_mismatch(gloo: GlooPool, tmp_path: Path) -> None:
    send_request(tmp_path / FLIGHT, "long ago", rank=1)
    axes: dict[str, object] = {**PATIENT, "parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 4}
    ends, found = analysed(gloo, tmp_path, asks, axes)
    assert ends == ["all steps are done"] * 2
    assert found.kind in ("nothing", "behind", "elsewhere", "not recorded"), (
        found.verdict
    )  # a slow poll may find a rank in its next collective
    assert {state.why for state in found.ranks} == {"a person asks"}
    assert all("tp" in "".join(group.label for group in dump.groups) for dump in read_dumps(tmp_path / FLIGHT).dumps)


def collectives(folder: str, settings: dict[str, object]) -> tuple[int, int]:
    """Return the number of this rank's collectives in a step, and the estimate of it."""
    from titan_core.loop.training import train

    os.chdir(folder)
    latest: list[int] = []

    class Counter:
        @hookimpl
        def titan_step_end(self) -> None:
            latest.append(max(entry["record_id"] for entry in flight_recorder_entries()))

    torch.set_num_threads(1)
    job = make_job("tiny", {**TINY, "job.device": "cpu", "parallelism.fsdp_group_mib": 0, **settings})
    train(job, [Counter()])
    return latest[2] - latest[1], collectives_per_step(job)


RECOMPUTED = {"activation_checkpoint.mode": "full", "model.args.n_kv_heads": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"parallelism.tensor_parallel_degree": 2, **RECOMPUTED},
        pytest.param(RECOMPUTED, marks=pytest.mark.full),
        pytest.param({"parallelism.context_parallel_degree": 2, **RECOMPUTED}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_number_of_collectives_in_a_step_is_known_beforehand(
    gloo: GlooPool, tmp_path: Path, settings: dict[str, object]
) -> None:
    for used, estimate in gloo.run(2, collectives, str(tmp_path), settings):
        assert estimate / 4 < used <= estimate
