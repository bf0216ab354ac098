"""Elastic jobs on two machines: launchers on two loopback addresses, and in two network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.distributions import python_path, write_distribution
from harness.machines import (
    Machine,
    children_of,
    ended,
    free_port,
    is_running,
    metrics,
    starts,
    trained_alone,
    trained_rows,
    wait_until,
    write_recorder,
)

BATCH = ["--training.local_batch_size", "2", "--training.global_batch_size", "-1", "--training.steps", "100000"]
"""4 ranks: a global batch of 8."""


def elastic(endpoint: str) -> list[str]:
    return ["--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, *BATCH]


def require_same_training(folder: Path, alone: Path, environment: dict[str, str], batch: int) -> None:
    """Compare a run with one of a single process: what it trained on, and its losses."""
    steps = metrics(folder)[-1]["step"]
    stop = ["--training.global_batch_size", str(batch), "--training.stop_at_step", str(steps)]
    trained_alone(alone, [*BATCH, *stop], environment)
    assert [line["step"] for line in metrics(folder)] == list(range(1, steps + 1))
    assert trained_rows(folder) == trained_rows(alone)
    losses, undisturbed = ([line["loss"] for line in metrics(one)] for one in (folder, alone))
    assert losses == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.long
def test_a_machine_is_killed_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    environment = {**write_recorder(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    options = elastic(f"127.0.0.2:{free_port('127.0.0.2')}")
    (folder / "gate-4").write_text("5 lost")
    (folder / "gate-2").write_text("9 back")
    machines = [Machine(folder, "127.0.0.2", options, environment)]
    with ended(machines):
        wait_until(lambda: machines[0].says("waiting for machines"), machines)  # it hosts the rendezvous
        machines.append(Machine(folder, "127.0.0.3", options, environment))
        wait_until(lambda: len(metrics(folder)) >= 4, machines)
        lost = machines.pop()
        its_ranks = lost.ranks()
        assert len(its_ranks) == 2
        lost.process.kill()
        lost.process.wait()
        wait_until(lambda: not any(map(is_running, its_ranks)), machines)
        (folder / "lost").touch()
        wait_until(lambda: len(metrics(folder)) >= 8, machines)

        machines.append(Machine(folder, "127.0.0.3", options, environment))
        wait_until(lambda: machines[1].says("waiting for machines"), machines)
        (folder / "back").touch()
        wait_until(
            lambda: len(starts(folder)) == 3 and metrics(folder)[-1]["step"] >= starts(folder)[-1]["step"] + 3, machines
        )
        machines[0].process.send_signal(signal.SIGINT)
        assert [machine.wait() for machine in machines] == [130, 130]
    assert children_of(folder) == []

    assert [start["world_size"] for start in starts(folder)] == [4, 2, 4]
    printed = machines[0].errors.read_text()
    assert "titan: 127.0.0.3 left; restarting: 4 -> 2 ranks (dp_shard=2), 2 accumulation steps, global batch 8\n" in printed
    assert "titan: 127.0.0.3 joined; restarting: 2 -> 4 ranks (dp_shard=4), no gradient accumulation, global" in printed
    assert "titan: error" not in printed
    require_same_training(folder, tmp_path / "alone", environment, 8)


FAULTY = """
import os
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from titan_core.api import hookimpl

api = (1, 0)

class Flips(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            found.view(torch.int32 if found.element_size() == 4 else torch.int16).view(-1)[0] ^= 64
        return found

@hookimpl
def titan_step_start(step):
    if step == 5 and "FAULTY" in os.environ:
        Flips().__enter__()
"""


@pytest.mark.long
def test_a_machine_with_a_faulty_device_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    site = python_path(write_distribution(tmp_path / "site", "faulty", FAULTY))
    environment = {"PYTHONPATH": site, "GLOO_SOCKET_IFNAME": "lo"}
    options = [*elastic(f"127.0.0.2:{free_port('127.0.0.2')}"), "--nproc-per-node", "1", "--max-restarts", "3"]
    options += ["--training.steps", "12", "--numerics.replay_freq", "2"]
    machines = [Machine(folder, "127.0.0.2", options, environment)]
    with ended(machines):
        wait_until(lambda: machines[0].says("waiting for machines"), machines)  # it hosts the rendezvous
        machines.append(Machine(folder, "127.0.0.3", options, {**environment, "FAULTY": "1"}))
        assert [machine.wait() for machine in machines] == [0, 76]
    assert [start["world_size"] for start in starts(folder)] == [2, 1]
    assert metrics(folder)[-1]["step"] == 12
    good, bad = (machine.errors.read_text() for machine in machines)
    assert "stopped: step 6: rank 1 (" in bad and "not restarted, because a restart would compute on the same device" in bad
    assert "titan: 127.0.0.3 left; restarting: 2 -> 1 ranks" in good
    assert "cannot be repeated on other ranks" in good


def command(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True, text=True)


@pytest.fixture(params=["", "netem delay 2ms 1ms loss 1%"], ids=["fast", "slow and lossy"])
def namespaces(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Two network namespaces with the addresses 10.213.0.1 and 10.213.0.2, joined by a link of a certain quality."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc (iproute2)")
    names = tuple(f"titan-{os.getpid()}-{number}" for number in (1, 2))
    links = tuple(f"titan{os.getpid() % 10**7}{letter}" for letter in "ab")
    made = []
    try:
        for name in names:
            command(f"ip netns add {name}")
            made.append(name)
        command(f"ip link add {links[0]} netns {names[0]} type veth peer name {links[1]} netns {names[1]}")
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            command(f"ip -n {name} link set {link} name eth0")
            command(f"ip -n {name} addr add 10.213.0.{number}/24 dev eth0")
            command(f"ip -n {name} link set eth0 up")
            command(f"ip -n {name} link set lo up")
            if request.param:
                command(f"ip netns exec {name} tc qdisc add dev eth0 root {request.param}")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine does not allow it: {' '.join(error.cmd)}: {error.stderr.strip()}")
    finally:
        for name in made:
            command(f"ip netns del {name}")


@pytest.mark.full
def test_two_machines_on_a_link(tmp_path: Path, namespaces: tuple[str, str]) -> None:
    folder = tmp_path / "job"
    environment = {**write_recorder(tmp_path), "GLOO_SOCKET_IFNAME": "eth0"}
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", "10.213.0.1:29500", *BATCH]
    machines = [
        Machine(folder, f"10.213.0.{number}", [*options, "--training.stop_at_step", "5"], environment, within)
        for number, name in enumerate(namespaces, 1)
        for within in [("ip", "netns", "exec", name)]
    ]
    with ended(machines):
        assert [machine.wait() for machine in machines] == [0, 0], machines[0].errors.read_text()
    assert children_of(folder) == []
    require_same_training(folder, tmp_path / "alone", environment, 4)
