"""Whoever reaches the port of a rendezvous cannot order anything: no code runs, and the job continues."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers

from harness.agents import KEY, Peer, agent_of
from harness.stranger import Stranger
from titan_core.api import UserError
from titan_launch.meeting import handler as handlers
from titan_launch.meeting.handler import Handler
from titan_launch.meeting.meeting_point import handler
from titan_launch.meeting.rendezvous import Rendezvous
from titan_testing import PATIENCE

pytestmark = pytest.mark.usefixtures("environment", "handlers")


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A store that outlives the machines of a test."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}"
    del store


def options(endpoint: str, key: bytes = KEY, most: int = 2, address: str = "127.0.0.1") -> Rendezvous:
    conf = {"keep_alive_interval": 1, "keep_alive_max_attempt": 60, "last_call_timeout": 1}
    return Rendezvous(endpoint, "test", (1, most), 60, address, key=key, conf=conf)


def repaired(machine: Handler, stranger: Stranger) -> bool:
    machine.num_nodes_waiting()
    state = stranger.state()
    return machine._records.opened("state", state) == machine.state.to_json()


def test_forged_states_change_nothing(endpoint: str, tmp_path: Path) -> None:
    machine = handler(options(endpoint))
    stranger = Stranger(endpoint, tmp_path)
    stranger.listens()
    first = machine.next_rendezvous()
    stranger.listens()
    other = handler(options(endpoint, address="127.0.0.2"))
    joining = threading.Thread(target=other.next_rendezvous)
    joining.start()
    while not machine.num_nodes_waiting():
        time.sleep(0.01)
    here = machine.next_rendezvous()
    joining.join()
    assert (len(first.members), len(here.members)) == (1, 2)
    for what, text in stranger.states().items():
        stranger.forge(text)
        assert not machine.is_closed() and not machine.changed(), what
        assert repaired(machine, stranger) and not other.is_closed(), what
    assert not stranger.proof.exists()
    machine.shutdown()
    assert other.is_closed()
    other.stop()


def test_records_of_a_round_are_written_again(endpoint: str, tmp_path: Path) -> None:
    """Those that a stranger overwrites or removes; what it adds is not there."""
    machine = handler(options(endpoint, most=1))
    machine.next_rendezvous()
    machine.put("plan", {"ranks": 2})
    place = machine._records.place(machine.round.prefix)
    stranger = Stranger(endpoint, tmp_path)
    stranger.store.set(f"{place}end", '{"status": 1}')
    stranger.store.set(f"{place}plan", '{"ranks": 1}')
    assert machine.get("end") is None
    until = time.monotonic() + PATIENCE
    while machine.get("plan") is None and time.monotonic() < until:
        time.sleep(0.05)
    assert machine.get("plan") == {"ranks": 2}
    machine.stop()


def test_a_launcher_with_another_key_is_refused_and_changes_nothing(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "REFUSE_SECONDS", 0.2)
    machine = handler(options(endpoint))
    machine.next_rendezvous()
    before = machine.state
    why = r"the job key of this machine differs from that of the machines that have met there; give every machine the same"
    with pytest.raises(UserError, match=why):
        handler(options(endpoint, key=b"another key, also of 32 characters"))
    assert not machine.changed() and machine.state == before
    machine.stop()


def test_a_machine_that_joins_waits_until_a_forged_state_is_repaired(endpoint: str, tmp_path: Path) -> None:
    machine = handler(options(endpoint, most=2))
    machine.next_rendezvous()
    stranger = Stranger(endpoint, tmp_path)
    stranger.forge(b"forged")
    ended = threading.Event()

    def looks() -> None:
        while not ended.wait(0.05):
            machine.is_closed()

    looking = threading.Thread(target=looks)
    looking.start()
    other = handler(options(endpoint))
    ended.set()
    looking.join()
    assert machine.node in other.members
    other.stop()
    machine.stop()


@pytest.mark.full
def test_two_machines_train_while_a_stranger_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them hosts the store. The ranks of one wait until the stranger has tried everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    here = options(f"127.0.0.1:{port}", most=2)
    fixed = replace(here, machines=(2, 2))
    script = 'while not os.path.exists(__file__ + ".tried"): time.sleep(0.01)'
    agent = agent_of(tmp_path, script, ranks=1, alone=fixed)
    peer = Peer(replace(fixed, local_addr="127.0.0.2"), 1)
    joining = peer.join()
    stranger = Stranger(here.endpoint, tmp_path)
    stranger.listens()

    def attack() -> None:
        joining.join()
        for text in stranger.states().values():
            stranger.forge(text)
            while not repaired(peer.handler, stranger):
                time.sleep(0.01)
        for name in ("end", "failure", "plan"):
            place = peer.handler._records.place(peer.handler.round.prefix + name)
            stranger.store.set(place, f'{"0" * 64} {{"status": 1, "line": "error: forged"}}')
        (tmp_path / "rank.py.tried").touch()

    attacking = threading.Thread(target=attack)
    attacking.start()
    agent.run()
    attacking.join()
    assert agent.failure is None and not stranger.proof.exists()


def test_a_server_listens_on_the_address_of_its_endpoint_only() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
    machine = handler(options(f"127.0.0.2:{port}"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    socket.create_connection(("127.0.0.2", port)).close()
    machine.stop()


def test_bind_chooses_the_address() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    machine = handler(replace(options(f"127.0.0.3:{port}"), bind="0.0.0.0"))
    for address in ("127.0.0.1", "127.0.0.3"):
        socket.create_connection((address, port)).close()
    machine.stop()
