"""gloo runs the collectives of each group in one thread: two of them corrupt the heap (torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_core.loop.world import join_world
from titan_core.torch_private import one_worker_per_gloo_group, process_groups
from titan_testing.jobs import make_job

GLOO: Any = dist.ProcessGroupGloo


def options(group: dist.ProcessGroup) -> Any:
    backend: Any = group._get_backend(torch.device("cpu"))
    return backend.options


def test_each_group_of_a_job_has_one_worker() -> None:
    start = GLOO.__init__
    with join_world(make_job("tiny", {"job.device": "cpu"})) as world:
        world.new_background_group()
        dist.new_group([0], timeout=timedelta(seconds=77))
        found = [options(group) for group in process_groups()]
        assert len(found) >= 3
        assert {one._threads for one in found} == {1}
        assert timedelta(seconds=77) in {one._timeout for one in found}
    assert GLOO.__init__ is start


@pytest.fixture
def one_worker() -> Iterator[None]:
    with one_worker_per_gloo_group():
        yield


def made(*arguments: Any, **named: Any) -> Any:
    """Make a group of this process alone; return its options."""
    return GLOO(dist.HashStore(), 0, 1, *arguments, **named).options  # type: ignore[attr-defined]  # public, see loop/world.py


def test_what_a_group_is_given_stays(one_worker: None) -> None:
    minute = timedelta(minutes=1)
    own = GLOO._Options()
    own._devices, own._timeout, own._threads = [GLOO.create_default_device()], minute, 4
    for found in (made(minute), made(timeout=minute), made(own), made(options=own)):
        assert (found._threads, found._timeout) == (1, minute)
    assert made()._timeout == timedelta(minutes=30)  # torch's default


@pytest.mark.parametrize(("interfaces", "number"), [("lo", 1), ("lo,lo", 2), ("", 1)])
def test_the_users_choice_of_interfaces_holds(
    one_worker: None, monkeypatch: pytest.MonkeyPatch, interfaces: str, number: int
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    assert len(made()._devices) == number
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError, match="none0"):
        made()
