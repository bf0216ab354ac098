"""Machines of an elastic job: launchers with an address each, and a plugin that says what their ranks have trained on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.distributions import python_path, write_distribution
from titan_core.toolkit.json_lines import read_lines
from titan_core.toolkit.launching import JOB_KEY
from titan_testing import PATIENCE

SMALL = [
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}", "--training.seq_len", "32",
    "--metrics.log_freq", "1", "--job.device", "cpu", "--job.dump_folder", "run", "--checkpoint.enable", "true",
    "--checkpoint.interval", "3", "--checkpoint.keep_latest_k", "2",
]  # fmt: skip
KEY = "the key of the machines of a test"
RECORDER = """
import hashlib, json, os, time
from pathlib import Path
from titan_core.api import hookimpl

api = (1, 0)

@hookimpl
def titan_before_update(update):
    rows = [hashlib.sha1(row.numpy().tobytes()).hexdigest() for one in update.microbatches for row in one.tokens]
    world, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    with open(f"trained-{rank}.jsonl", "a") as file:
        file.write(json.dumps({"step": update.step, "world": int(world), "pid": os.getpid(), "rows": rows}) + "\\n")
    gate = Path(f"gate-{world}")  # its step needs a file of that name to proceed
    if gate.exists() and rank == "0":
        step, _, opened = gate.read_text().partition(" ")
        while update.step >= int(step) and not Path(opened).exists():
            time.sleep(0.02)
"""


def write_recorder(folder: Path) -> dict[str, str]:
    """Install a plugin that records the rows of each step; return the environment in which it is found.

    A file ``gate-N`` with "STEP FILE" makes a job of N ranks wait in that step until FILE exists.
    """
    return {"PYTHONPATH": python_path(write_distribution(folder / "site", "recorder", RECORDER))}


def trained_rows(folder: Path) -> dict[int, list[str]]:
    """Return the rows of each step, sorted: those of the last attempt that took the step."""
    steps: dict[int, dict[int, list[list[str]]]] = {}
    worlds: dict[int, int] = {}
    lines = [
        (int(file.stem.partition("-")[2]), line) for file in folder.glob("trained-*.jsonl") for line in read_lines(file)
    ]
    order = {line["step"]: line for rank, line in lines if rank == 0}  # the last one of rank 0 counts
    for rank, line in lines:
        step = line["step"]
        if line["world"] == order[step]["world"]:
            worlds[step] = line["world"]
            steps.setdefault(step, {}).setdefault(rank, []).append(line["rows"])
    return {step: sorted(row for rank in ranks for row in ranks[rank][-1]) for step, ranks in steps.items()}


def free_port(address: str) -> int:
    """Return a port that is free on ``address``."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


class Machine:
    """A launcher: one machine of a job."""

    def __init__(
        self,
        folder: Path,
        address: str | None,
        arguments: list[str],
        environment: dict[str, str],
        within: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            address: where others reach it; ``None``: it does not say.
            within: a command that runs another one, such as in a network namespace.
        """
        folder.mkdir(exist_ok=True)
        count = len(list(folder.glob("machine-*.txt")))
        self.errors = folder / f"machine-{count}.txt"
        command = [*within, sys.executable, "-m", "titan_core", "train", *SMALL, *arguments]
        if address is not None:
            command += ["--local-addr", address]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", JOB_KEY: KEY, **environment}
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors, env=environment, start_new_session=True
            )

    def says(self, text: str) -> bool:
        """Whether the launcher has printed ``text``."""
        return text in self.errors.read_text()

    def ranks(self) -> list[int]:
        """Return the process ids of the launcher's children."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found]

    def wait(self) -> int:
        """Return the exit status."""
        return self.process.wait(PATIENCE)


def trained_alone(folder: Path, arguments: list[str], environment: dict[str, str]) -> None:
    """Train in one process, undisturbed."""
    folder.mkdir()
    command = [sys.executable, "-m", "titan_core", "train", *SMALL, *arguments]
    subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def ended(machines: list[Machine]) -> Iterator[None]:
    """End whatever is left of the machines, also if the test fails."""
    try:
        yield
    finally:
        for machine in machines:
            machine.process.kill()
            machine.process.wait()


def wait_until(condition: Callable[[], object], machines: list[Machine]) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: the condition does not become true, with what the machines have printed.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        printed = "\n".join(machine.errors.read_text() for machine in machines)
        assert time.monotonic() < deadline and all(machine.process.poll() is None for machine in machines), printed
        time.sleep(0.05)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the logged steps."""
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]


def starts(folder: Path) -> list[dict[str, Any]]:
    """Return the start events of the run."""
    file = folder / "run" / "events.jsonl"
    return [event for event in read_lines(file) if event["event"] == "start"] if file.exists() else []


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children_of(folder: Path) -> list[int]:
    """Return the processes whose working directory is ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if os.readlink(entry / "cwd") == str(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if is_running(pid)]
