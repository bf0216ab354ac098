"""Which failures end a replica group, and which do not. torchft is played by a fake; the group has one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError  # type: ignore[attr-defined]  # public, but not exported to type checkers

from titan_core.api import RunStopped, StepAbandoned
from titan_core.toolkit.errors import EXIT_FAILURE, caused_by_peer
from titan_ft import groups as groups_module
from titan_ft.check import own_host
from titan_ft.config import FaultToleranceSection
from titan_ft.groups import MOST_COPIES, MOST_FAILURES, ReplicaGroups
from titan_ft.torchft_api import Behind


class Manager:
    """Forms quorums that fail with ``joining``, and decides on steps. Two groups take part in each."""

    def __init__(self) -> None:
        self.behind = Behind()
        self.joining: Exception | None = None
        self.votes: list[bool] = []
        self.deciding: Exception | None = None
        self._step = 0
        self._error: Any = None

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step = state["step"]

    def current_step(self) -> int:
        return self._step

    def num_participants(self) -> int:
        return 2

    def start_quorum(self) -> None:
        self._error = None
        if self.joining is not None:
            self.report_error(self.joining)

    def report_error(self, error: Exception) -> None:
        self._error = SimpleNamespace(original_exception=error)

    def errored(self) -> Any:
        return self._error

    def should_commit(self) -> bool:
        if self.deciding is not None:
            raise self.deciding
        self.votes.append(self._error is None)
        self._step += self._error is None
        return self._error is None


class Group:
    """torchft's process group."""

    aborted = 0

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    made = Manager()

    def make(*_: Any, **named: Any) -> Manager:
        assert named["host"] == own_host("") and own_host("") in named["transport"].metadata()
        named["transport"].shutdown()
        return made

    monkeypatch.setattr(groups_module, "manager", make)
    monkeypatch.setattr(groups_module, "process_group", lambda *_: Group())
    monkeypatch.setattr(groups_module, "behind", lambda manager: manager.behind)
    monkeypatch.setattr(groups_module, "_require_lighthouse", lambda *_: None)
    return made


@pytest.fixture
def groups(manager: Manager) -> ReplicaGroups:
    world: Any = SimpleNamespace(rank=0, size=1, on_first_rank=lambda call: call(), sum=lambda tensor: tensor)
    return ReplicaGroups(FaultToleranceSection(), world, 0, 1.0, dict)


def fail(groups: ReplicaGroups, manager: Manager) -> None:
    """Join the others for a step that fails."""
    groups.join()
    manager.report_error(RuntimeError("Connection closed by peer"))
    groups.commit()


def take_a_step(groups: ReplicaGroups) -> None:
    groups.join()
    groups.commit()


def test_a_group_that_cannot_copy_the_state_of_a_peer_ends_soon(groups: ReplicaGroups, manager: Manager) -> None:
    manager.behind, manager.joining = Behind(this=True), TimeoutError("did not arrive")
    for _ in range(MOST_COPIES - 1):
        with pytest.raises(StepAbandoned):
            groups.join()
    with pytest.raises(RunStopped) as caught:
        groups.join()
    assert str(caught.value) == (
        f"replica group 0: could not copy the state of a peer {MOST_COPIES} times in a row; the last time: did not arrive. "
        "Check that the groups reach each other's ports, or raise fault_tolerance.process_group_timeout_ms (now 10000), and "
        "start the group again: the others continue without it"
    )
    assert caught.value.exit_status == EXIT_FAILURE  # the launcher restarts it
    assert manager.votes == [False] * MOST_COPIES  # also the last one: the others need not wait for it
    assert groups._group.aborted == MOST_COPIES  # type: ignore[attr-defined]


def test_copies_are_counted_in_a_row(groups: ReplicaGroups, manager: Manager) -> None:
    for _ in range(2 * MOST_COPIES):
        manager.behind, manager.joining = Behind(this=True), TimeoutError("did not arrive")
        with pytest.raises(StepAbandoned):
            groups.join()
        manager.behind, manager.joining = Behind(), None
        take_a_step(groups)


@pytest.mark.parametrize("begun", [True, False], ids=["a group that trains", "a group that joins"])
def test_failures_while_another_group_joins_do_not_count(groups: ReplicaGroups, manager: Manager, begun: bool) -> None:
    if begun:
        take_a_step(groups)
    manager.behind = Behind(others=True)
    for _ in range(2 * MOST_FAILURES):
        with pytest.raises(StepAbandoned):
            fail(groups, manager)


def test_a_group_that_joins_ends_before_those_that_train(groups: ReplicaGroups, manager: Manager) -> None:
    """They fail together, and nobody knows who is at fault."""
    for _ in range(MOST_FAILURES // 2 - 1):
        with pytest.raises(StepAbandoned):
            fail(groups, manager)
    with pytest.raises(
        RunStopped, match=r"step 1 failed 10 times in a row; the last time: Connection closed by peer\. Check"
    ):
        fail(groups, manager)


def test_a_group_that_trains_ends_after_many_failures(groups: ReplicaGroups, manager: Manager) -> None:
    take_a_step(groups)
    for _ in range(MOST_FAILURES - 1):
        with pytest.raises(StepAbandoned):
            fail(groups, manager)
    with pytest.raises(RunStopped, match="step 2 failed 20 times in a row"):
        fail(groups, manager)


def test_a_rank_that_does_not_vote_is_a_lost_peer(groups: ReplicaGroups, manager: Manager) -> None:
    groups.join()
    manager.deciding = TimeoutError("Timeout expired")
    with pytest.raises(DistNetworkError, match="replica group 0: its ranks did not decide on step 1") as caught:
        groups.commit()
    assert caused_by_peer(caught.value)
