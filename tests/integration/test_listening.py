"""On which addresses the processes of a job listen."""

from __future__ import annotations

import ipaddress
import os
import signal
import struct
from pathlib import Path

import pytest

from harness.machines import Machine, ended, metrics, wait_until

LISTEN = "0A"
"""State of a socket in ``/proc/net/tcp``."""


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and rest[5] in inodes:
                found.add(_address(local.partition(":")[0]))
    return found


def _address(text: str) -> str:
    """Return an address of ``/proc/net/tcp``, whose words are those of the machine."""
    words = [struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


@pytest.mark.parametrize(("text", "address"), [("0100007F", "127.0.0.1"), ("00000000", "0.0.0.0"), ("0" * 32, "::")])
def test_addresses_are_read(text: str, address: str) -> None:
    assert _address(text) == address


def test_a_job_of_one_machine_listens_on_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher, its ranks and their children: stores and gloo."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # of the tests
        monkeypatch.delenv(name, raising=False)
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
