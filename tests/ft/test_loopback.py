"""A launcher of one machine keeps its ranks to loopback; replica groups meet where their lighthouse is."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from harness.listening import listening
from titan_core.toolkit.launching import CONFINED
from titan_core.toolkit.listening import bound_socket, listening_address
from titan_ft.config import FaultToleranceSection
from titan_ft.plugin import titan_job_assembled

ONE_MACHINE, NETWORK = "http://127.0.0.1:29510", "http://10.0.0.1:29510"


@pytest.mark.parametrize(("enabled", "lighthouse"), [(False, NETWORK), (True, ONE_MACHINE), (True, NETWORK)])
def test_the_ranks_of_a_replica_group_leave_loopback(
    enabled: bool, lighthouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")  # the user has chosen it
    monkeypatch.setenv(CONFINED, "GLOO_SOCKET_IFNAME")
    section = FaultToleranceSection(enable=enabled, lighthouse=lighthouse)
    job: Any = SimpleNamespace(config=SimpleNamespace(section=lambda kind: section))
    titan_job_assembled(job)
    assert ("GLOO_SOCKET_IFNAME" in os.environ) != (enabled and lighthouse == NETWORK)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "mine"


def test_groups_of_several_machines_listen_on_the_address_that_they_advertise() -> None:
    """All others would refuse a connection; a name that leads nowhere else but to loopback is of no use to them."""
    assert listening_address("127.0.0.2") == "127.0.0.2" and listening_address("203.0.113.7") == ""
    with bound_socket("127.0.0.3") as bound:
        bound.listen()
        assert listening(os.getpid()) >= {"127.0.0.3"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", bound.getsockname()[1]))
