"""On which addresses the processes of a job listen."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from harness.listening import address_of, listening
from harness.machines import Machine, ended, metrics, wait_until
from harness.replicas import lighthouse


@pytest.mark.parametrize(("text", "address"), [("0100007F", "127.0.0.1"), ("00000000", "0.0.0.0"), ("0" * 32, "::")])
def test_addresses_are_read(text: str, address: str) -> None:
    assert address_of(text) == address


@pytest.fixture(autouse=True)
def any_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # of the tests
        monkeypatch.delenv(name, raising=False)


@pytest.mark.full
def test_a_job_of_one_machine_listens_on_loopback_only(tmp_path: Path) -> None:
    """Its launcher, its ranks and their children: stores and gloo."""
    folder = tmp_path / "job"
    machine = Machine(folder, None, ["--nproc-per-node", "2", "--training.steps", "100000"], {})
    with ended([machine]):
        wait_until(lambda: metrics(folder), [machine])
        ranks = machine.ranks()
        assert len(ranks) == 2
        found = {pid: listening(pid) for pid in (machine.process.pid, *ranks)}
        assert found[machine.process.pid] == set()  # it meets nobody
        assert all(found[rank] for rank in ranks)  # gloo's
        assert set.union(*found.values()) <= {"127.0.0.1"}
        machine.process.send_signal(signal.SIGINT)
        assert machine.wait() == 130


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_replica_groups_of_one_machine_listen_on_loopback_only(ranks: int, tmp_path: Path) -> None:
    """Their stores, their managers, what sends their state, and gloo."""
    with lighthouse() as address:
        given = [
            "--training.local_batch_size", "1", "--training.global_batch_size", "4", "--training.steps", "100000",
            "--fault_tolerance.enable", "true", "--fault_tolerance.lighthouse", address,
            "--fault_tolerance.min_replica_size", "2", *(["--nproc-per-node", str(ranks)] if ranks > 1 else []),
        ]  # fmt: skip
        groups = [Machine(tmp_path / str(n), None, [*given, "--fault_tolerance.replica_id", str(n)], {}) for n in range(2)]
        with ended(groups):
            wait_until(lambda: all(metrics(tmp_path / str(n)) for n in range(2)), groups)
            found = {pid: listening(pid) for group in groups for pid in (group.process.pid, *group.ranks())}
            for group in groups:
                group.process.send_signal(signal.SIGINT)
    assert {"127.0.0.1"} <= set.union(*found.values()) <= {"127.0.0.1", "::ffff:127.0.0.1"}, found
