"""Two launchers whose rendezvous a stranger without their key reaches: no code runs, and the job ends well."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.machines import KEY, Machine, ended, free_port, metrics, wait_until, write_recorder
from harness.stranger import Stranger
from titan_core.toolkit.launching import JOB_KEY
from titan_launch.meeting.signed_store import Forged, SignedStore


@pytest.mark.full
def test_launchers_continue_and_refuse_a_stranger(tmp_path: Path) -> None:
    endpoint = f"127.0.0.2:{free_port('127.0.0.2')}"
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint, "--training.local_batch_size", "2"]
    options += ["--training.global_batch_size", "4", "--training.steps", "4"]
    environment = {**write_recorder(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "gate-2").write_text("3 tried")
    machines = [Machine(folder, f"127.0.0.{number}", options, environment) for number in (2, 3)]
    with ended(machines):
        wait_until(lambda: len(metrics(folder)) == 2, machines)
        stranger = Stranger(endpoint, tmp_path, "titan")
        of_job = SignedStore(stranger.store, KEY.encode(), "titan")

        def repaired() -> bool:
            try:
                return of_job.opened("state", stranger.state()) is not None
            except Forged:
                return False

        for text in stranger.states().values():
            stranger.forge(text)
            wait_until(repaired, machines)
        other = Machine(
            tmp_path / "other", "127.0.0.4", options, {**environment, JOB_KEY: "a key of somebody else, 32 letters"}
        )
        with ended([other]):
            assert other.wait() == 2
            assert other.says("the job key of this machine differs from that of the machines that have met there")
        (folder / "tried").touch()
        assert [machine.wait() for machine in machines] == [0, 0]
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert not stranger.proof.exists()
