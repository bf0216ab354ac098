"""Binding ranks to the cores near their GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_core.api import UserError
from titan_launch.ranks import numa
from titan_testing.jobs import make_job

EVERY_CORE = set(range(8))
THREADS = ["11", "12", "13"]
ENDED = 12


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two NUMA nodes of four cores, with a GPU on each, and a process of three threads, one of which ends before it can be
    bound; ``bound`` maps a thread to its cores."""
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
        gpu = tmp_path / f"bus/pci/devices/0000:{node + 26:02x}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "numa_node").write_text(f"{node}\n")
    machine = SimpleNamespace(system=tmp_path, device="cuda", local_rank=0, allowed=EVERY_CORE, bound={})

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=26 + machine.local_rank, pci_device_id=0)

    def bind_thread(thread: int, cores: set[int]) -> None:
        if thread == ENDED:
            raise ProcessLookupError
        machine.bound[thread] = cores

    monkeypatch.setattr(numa, "choose_device", lambda choice: torch.device(machine.device, machine.local_rank))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: machine.allowed)
    monkeypatch.setattr(os, "sched_setaffinity", bind_thread)
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: THREADS if folder == "/proc/self/task" else listed(folder))
    return machine


def bind(machine: Any, **environment: str) -> None:
    numa.bind(make_job("tiny"), {"LOCAL_RANK": str(machine.local_rank), **environment}, machine.system)


@pytest.mark.parametrize(("rank", "cores"), [(0, {0, 1, 4, 5}), (1, {2, 3, 6, 7})])
@pytest.mark.parametrize("binding", [{}, {"TITAN_NUMA_BINDING": "node"}], ids=["auto", "node"])
def test_a_rank_is_bound_to_the_cores_near_its_gpu(
    machine: Any, caplog: pytest.LogCaptureFixture, rank: int, cores: set[int], binding: dict[str, str]
) -> None:
    machine.local_rank = rank
    with caplog.at_level("INFO"):
        bind(machine, **binding)
    assert machine.bound == {11: cores, 13: cores}
    assert f"bound to the 4 cores of NUMA node {rank}, near cuda:{rank}" in caplog.text


def test_a_rank_that_something_else_has_bound_stays_there(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine.allowed = {0, 2}
    with caplog.at_level("INFO"):
        bind(machine)
    assert machine.bound == {}
    assert "something else has bound this rank" in caplog.text
    bind(machine, TITAN_NUMA_BINDING="node")
    assert set(map(frozenset, machine.bound.values())) == {frozenset({0})}


@pytest.mark.parametrize("unknown", ["-1\n", None])
def test_nothing_happens_where_the_node_is_unknown(machine: Any, unknown: str | None) -> None:
    file = machine.system / "bus/pci/devices/0000:1a:00.0/numa_node"
    file.unlink()
    if unknown is not None:
        file.write_text(unknown)
    bind(machine)
    assert machine.bound == {}


def test_ranks_on_the_cpu_are_bound_only_on_request(machine: Any) -> None:
    machine.device, machine.local_rank = "cpu", 2
    bind(machine)
    bind(machine, TITAN_NUMA_BINDING="off")
    assert machine.bound == {}
    bind(machine, TITAN_NUMA_BINDING="node", LOCAL_WORLD_SIZE="4")
    assert set(map(frozenset, machine.bound.values())) == {frozenset({2, 3, 6, 7})}


def test_off_leaves_ranks_on_gpus(machine: Any) -> None:
    bind(machine, TITAN_NUMA_BINDING="off")
    assert machine.bound == {}


def test_an_unknown_binding_is_refused(machine: Any) -> None:
    with pytest.raises(UserError, match="TITAN_NUMA_BINDING = 'socket': no such binding; use one of auto, node, off"):
        bind(machine, TITAN_NUMA_BINDING="socket")


def test_the_lists_of_this_machine_are_understood() -> None:
    files = list(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    if not files:
        # A container may hide /sys. The other tests use made-up nodes; this one reads the machine's.
        pytest.skip("this system does not report its NUMA nodes")
    assert set().union(*map(numa._cores, files)) >= os.sched_getaffinity(0)
