"""A launcher of one machine keeps its ranks to loopback; replica groups meet on the network."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from titan_core.toolkit.launching import CONFINED
from titan_ft.config import FaultToleranceSection
from titan_ft.plugin import titan_job_assembled


@pytest.mark.parametrize("enabled", [False, True])
def test_the_ranks_of_a_replica_group_leave_loopback(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")  # the user has chosen it
    monkeypatch.setenv(CONFINED, "GLOO_SOCKET_IFNAME")
    section = FaultToleranceSection(enable=enabled)
    job: Any = SimpleNamespace(config=SimpleNamespace(section=lambda kind: section))
    titan_job_assembled(job)
    assert ("GLOO_SOCKET_IFNAME" in os.environ) != enabled
    assert os.environ["NCCL_SOCKET_IFNAME"] == "mine"
