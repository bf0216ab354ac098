"""Dumps of the flight recorder on a mesh with several parallelisms: see ``tests/debug/test_flight_recorder.py``."""

from __future__ import annotations

from pathlib import Path

from harness.flights import FLIGHT, PATIENT, analysed, asks
from harness.gloo_pool import GlooPool
from titan_debug.flight.read import read_dumps
from titan_debug.request import send_request


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
