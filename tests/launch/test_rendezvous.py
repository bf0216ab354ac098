"""Mistakes in the rendezvous options, and failures of the rendezvous: each is reported in one line."""

from __future__ import annotations

import argparse
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers

from harness.agents import KEY, agent_of
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.toolkit import status
from titan_core.toolkit.launching import LOCAL_ADDRESS
from titan_core.toolkit.status import StatusLine
from titan_launch.launch import environment_of_ranks
from titan_launch.meeting import meeting_point
from titan_launch.meeting.meeting_point import require_meeting_point
from titan_launch.meeting.rendezvous import (
    Rendezvous,
    RendezvousClosed,
    RendezvousLost,
    RendezvousTimeout,
    options_of,
    rendezvous_errors,
)
from titan_launch.options import machines, processes_per_node
from titan_launch.terminal.console import Console


@pytest.fixture
def listening() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_JOB_KEY", KEY.decode())


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "--nnodes: several machines need an address to meet at; add the same --rdzv-endpoint HOST:PORT on every"),
        (["--rdzv-endpoint", "node0:99999"], "--rdzv-endpoint node0:99999: must be HOST:PORT; write it as in node0:29500"),
        (["--rdzv-endpoint", ":29500"], "--rdzv-endpoint :29500: must be HOST:PORT; write it as in node0:29500"),
        (["--rdzv-endpoint", "node0:29500", "--rdzv-timeout", "1000000000000"], "is not a whole number from 1 to 86400"),
        (["--rdzv-endpoint", "node0:" + "9" * 5000], "99: must be HOST:PORT"),
        (["--rdzv-endpoint", "node0:29500", "--rdzv-timeout", "0"], "is not a whole number from 1 to 86400"),
        (["--elastic", "stop", "--rdzv-endpoint", "node0:29500"], "--elastic stop: applies only to a range of machines"),
        (["--rdzv-endpoint", "node0:29500", "--rdzv-conf", "last_call"], "--rdzv-conf last_call: must be KEY=VALUE"),
        (["--rdzv-endpoint", "node0:29500", "--rdzv-conf", "is_host=1"], "is_host=1: the rendezvous has no such"),
        (["--rdzv-endpoint", "node0:29500", "--rdzv-conf", "last_call_timeout=-1"], "timeout=-1: must be a whole number"),
        (["--rdzv-endpoint", "node0:29500", "--local-addr", "203.0.113.1"], "is not an address of this machine; use one"),
        (["--rdzv-endpoint", "node0:29500", "--bind", "203.0.113.1"], "--bind 203.0.113.1: is not an address of this"),
        (["--rdzv-endpoint", "node0:29500", "--local-addr", "no-such-host.invalid"], "invalid: cannot be resolved: "),
        (["--nnodes", "3:2", "--rdzv-endpoint", "node0:29500"], "--nnodes 3:2: the range is empty"),
        (["--rdzv-endpoint", "no-such-host.invalid:29500"], "cannot resolve the host name 'no-such-host.invalid'"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused_at_once(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny", "--nnodes", "2", *arguments]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def options(endpoint: str, timeout: int = 1) -> Rendezvous:
    return Rendezvous(endpoint, "titan", (2, 2), timeout, key=KEY)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints are those of another machine."""
    monkeypatch.setattr(meeting_point, "is_local_address", lambda *given: False)


def test_a_machine_that_does_not_answer(free: int, elsewhere: None) -> None:
    with pytest.raises(UserError, match=rf"localhost:{free}: nothing answered within 1 s \(Connection refused\); check"):
        require_meeting_point(options(f"localhost:{free}"))


def test_endpoints_that_work_are_accepted(listening: int, free: int) -> None:
    require_meeting_point(options(f"localhost:{listening}"))
    require_meeting_point(options(f"localhost:{free}"))  # this machine itself will listen there


def test_a_store_is_recognised_while_an_error_is_handled() -> None:
    """As after the loss of the old store."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    try:
        raise ConnectionError
    except ConnectionError:
        assert meeting_point._answers("localhost", store.port)


def test_another_kind_of_server_at_the_endpoint_is_reported(listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_point, "ANSWER_SECONDS", 0.2)
    threads = threading.active_count()
    why = rf"localhost:{listening}: another server uses this port: it does not answer as a torch rendezvous; choose"
    with pytest.raises(UserError, match=why):
        meeting_point.handler(options(f"localhost:{listening}"))
    # A thread that torch keeps waiting would abort the process when the interpreter exits.
    assert threading.active_count() == threads


def test_a_torch_store_at_the_endpoint_is_joined() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    found = meeting_point.handler(options(f"localhost:{store.port}"))
    assert store.check(["titan/titan/state"])
    found.stop()


@pytest.mark.parametrize(
    ("error", "cause", "why"),
    [
        (RendezvousTimeout(), None, "fewer than 2 machines joined within 1 s (--rdzv-timeout); start titan on every"),
        (RendezvousClosed(), None, "the rendezvous 'titan' is closed: that job has ended"),
        (RendezvousLost("see inner"), RuntimeError("[x.cpp:1] The server has gone.\nframe #0"),
         "no rendezvous answers there (The server has gone.)"),
    ],
)  # fmt: skip
def test_errors_of_the_rendezvous_are_reported_in_one_line(error: Exception, cause: Exception | None, why: str) -> None:
    error.__cause__ = cause
    with pytest.raises(UserError) as caught, rendezvous_errors(options("node0:29500")):
        raise error
    assert str(caught.value).startswith("--rdzv-endpoint node0:29500: ") and why in str(caught.value)
    assert "frame" not in str(caught.value)


def test_the_number_of_machines_may_exceed_the_limit_of_processes_per_machine() -> None:
    assert machines("2048") == (2048, 2048) and machines("2:4096") == (2, 4096)
    assert processes_per_node("8") == 8


@pytest.mark.parametrize("endpoint", [None, "node0:29500"])
def test_one_machine_meets_nobody(endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor needs a key. A script that starts any number of machines may pass the endpoint anyway."""
    monkeypatch.delenv("TITAN_JOB_KEY")
    arguments = argparse.Namespace(rdzv_timeout=600, rdzv_endpoint=endpoint, rdzv_conf=None, local_addr=None, bind=None)
    assert options_of(arguments, 1, 1).endpoint == ""


def test_ranks_know_the_address_of_their_machine() -> None:
    """Replica groups are reached there."""
    settings = argparse.Namespace(numa_binding=None)
    given = replace(options("node0:29500"), local_addr="127.0.0.1")
    assert environment_of_ranks(settings, given, 1, Path("outcomes"), Path("logs"))[LOCAL_ADDRESS] == "127.0.0.1"
    assert LOCAL_ADDRESS not in environment_of_ranks(settings, options("node0:29500"), 1, Path("outcomes"), Path("logs"))


@pytest.mark.parametrize(
    "option",
    [
        "--bind 127.0.0.1", "--rdzv-endpoint a:1", "--rdzv-id x", "--rdzv-timeout 5", "--max-restarts 3", "--grace 60",
        "--tee 0", "--log-dir x",
    ],
)  # fmt: skip
def test_rendezvous_options_are_refused_in_a_job_of_one_process(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", *option.split()]) == 2
    assert f"{option}: applies only to a job of several processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--rdzv-endpoint node0:99999", "--rdzv-endpoint node0:99999: must be HOST:PORT"),
        ("--rdzv-id x", "--rdzv-id x: applies only to machines that meet; add --rdzv-endpoint HOST:PORT"),
        ("--rdzv-timeout 5", "--rdzv-timeout 5: applies only to machines that meet"),
        ("--rdzv-conf keep_alive_interval=1", "keep_alive_interval=1: applies only to machines that meet"),
        ("--restart-wait 1", "--restart-wait 1: applies only to a job that is restarted; add --max-restarts N"),
        ("--max-restarts 0 --restart-wait-max 9", "--restart-wait-max 9: applies only to a job that is restarted"),
    ],
)
def test_options_are_checked_on_one_machine_too(options: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", "--nproc-per-node", "2", *options.split()]) == 2
    assert why in capsys.readouterr().err


def test_a_machine_says_whom_it_waits_for(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "PLAIN_SECONDS", 0.3)
    alone = options(f"localhost:{free}")
    console = Console()
    with pytest.raises(UserError, match=r"machines joined within 1 s \(--rdzv-timeout\)"), rendezvous_errors(alone):
        agent_of(tmp_path, "", console=console, alone=alone).run()
    console.close()
    # A slow machine may say so twice, or not know yet that it has joined itself.
    expected = rf"(titan: waiting for machines at localhost:{free}: (1|0) of 2 joined \(\d+ s\)\n)+"
    assert re.fullmatch(expected, capfd.readouterr().err)


def test_a_machine_says_where_it_connects(
    free: int, elsewhere: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "PLAIN_SECONDS", 0.3)
    with StatusLine(), pytest.raises(UserError, match="nothing answered within 1 s"):
        require_meeting_point(options(f"localhost:{free}"))
    assert capsys.readouterr().err == f"titan: connecting to localhost:{free}: tries for 1 s (0 s)\n"
