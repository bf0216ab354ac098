"""The address at which peers reach this machine."""

from __future__ import annotations

import socket

import pytest

from titan_core.toolkit.launching import LOCAL_ADDRESS
from titan_ft.check import own_host


@pytest.mark.parametrize(
    ("name", "full", "given", "lighthouse", "expected"),
    [
        ("pod-0", "pod-0.jobs.default.svc.cluster.local", None, "jobs-0", "pod-0.jobs.default.svc.cluster.local"),
        ("pod-0", "pod-0.jobs.default.svc.cluster.local", "10.0.0.7", "127.0.0.1", "10.0.0.7"),
        ("pod-0.jobs", "pod-0.jobs.default.svc", None, "10.0.0.1", "pod-0.jobs.default.svc"),
        ("laptop", "localhost", None, "10.0.0.1", "laptop"),
        ("laptop", "laptop.lan", None, "127.0.0.1", "127.0.0.1"),
        ("laptop", "laptop.lan", None, "localhost", "127.0.0.1"),
        ("laptop", "laptop.lan", None, "[::1]", "127.0.0.1"),
        ("laptop", "1.1.0.127.in-addr.arpa", None, "10.0.0.1", "laptop"),
        ("laptop", "laptop", "", "10.0.0.1", "laptop"),
    ],
)
def test_own_host(
    name: str, full: str, given: str | None, lighthouse: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(socket, "getfqdn", lambda _: full)
    monkeypatch.delenv(LOCAL_ADDRESS, raising=False)
    if given is not None:
        monkeypatch.setenv(LOCAL_ADDRESS, given)
    assert own_host(f"http://{lighthouse}:29510") == expected
