"""The machines of the job: starts the agents of `titan train`, and starts those that end again, as a cluster's supervisor
does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.site.titan_chaos import FOLDER
from titan_core.toolkit.errors import EXIT_USER_ERROR
from titan_core.toolkit.launching import JOB_KEY
from titan_core.toolkit.processes import environment_of_child

SITE = Path(__file__).parent / "site"
RECIPE = Path(__file__).parent / "recipe.toml"
_LISTEN = "0A"


class ChaosFailure(Exception):
    """The job did not survive a fault."""


@dataclass
class Agent:
    """One machine."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    held: bool = False
    """Whether the machine is gone: it is not started again until :meth:`Cluster.bring_back`."""
    done: bool = False
    """Whether its part of the job is complete."""


def titan_train(run: Path, overrides: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """Return the command that trains in ``run``."""
    base = [sys.executable, "-m", "titan_core", "train", str(RECIPE), *launcher]
    return [*base, "--job.dump_folder", str(run), *overrides]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of agents whose ranks record what they train on in ``folder``."""
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH", "")]))
    own = {
        JOB_KEY: "the key of the machines of a disturbed job",
        FOLDER: str(folder),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **environment_of_child(), "GLOO_SOCKET_IFNAME": "lo", **own}


class Cluster:
    """A job of two agents on this machine."""

    def __init__(self, folder: Path, run: Path, ranks: int, overrides: Sequence[str]) -> None:
        """
        Args:
            folder: where the agents' output and the plugin's records are written.
            run: the run directory.
            ranks: number of ranks, over both agents.
        """
        self._folder = folder
        self._port = _free_port()
        launcher = ["--nproc-per-node", str(ranks // 2), "--nnodes", "1:2", "--max-restarts", "1000"]
        launcher += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "chaos"]
        command = titan_train(run, overrides, launcher)
        self.agents = [Agent(f"agent {number}", command, folder / f"agent-{number}.log") for number in range(2)]
        self.exits: list[tuple[str, int]] = []
        """Name and exit status of each agent that ended."""

    def start(self) -> None:
        """Start the agents."""
        for agent in self.agents:
            self._start(agent)

    def _start(self, agent: Agent) -> None:
        with agent.log.open("ab") as log:
            agent.process = subprocess.Popen(
                agent.command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(self._folder),
                cwd=self._folder,
            )

    def supervise(self) -> None:
        """Start agents again that have ended, unless their part of the job is complete or they are held back.

        Raises:
            ChaosFailure: an agent ended with an error that another start cannot fix.
        """
        for agent in self.agents:
            status = None if agent.process is None else agent.process.poll()
            if status is None:
                continue
            self.exits.append((agent.name, status))
            agent.process = None
            agent.done = status == 0
            if status == EXIT_USER_ERROR:
                raise ChaosFailure(f"{agent.name} ended with status {status}: {self.last_line(agent)}")
            if not agent.done and not agent.held:
                self._start(agent)

    @property
    def done(self) -> bool:
        """Whether every agent has completed its part of the job."""
        return all(agent.done for agent in self.agents)

    def host(self) -> Agent:
        """Return the agent that hosts the rendezvous.

        Raises:
            ChaosFailure: no agent does.
        """
        listening = _listening(self._port)
        for agent in self.agents:
            if agent.process is not None and listening & _sockets_of(agent.process.pid):
                return agent
        raise ChaosFailure(f"no agent listens on port {self._port}")

    def bring_back(self, agent: Agent) -> None:
        """Start an agent that was held back."""
        agent.held = False
        if agent.process is None:
            self._start(agent)

    @staticmethod
    def send(agent: Agent, number: signal.Signals) -> None:
        """Send a signal to an agent, not to its ranks."""
        if agent.process is not None:
            agent.process.send_signal(number)

    @staticmethod
    def last_line(agent: Agent) -> str:
        """Return the last line that the agent printed."""
        lines = agent.log.read_text(errors="replace").splitlines() if agent.log.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "it printed nothing")

    def processes(self) -> dict[int, str]:
        """Return the processes of the job, by process id, with their command lines: agents, ranks, and all that they
        started."""
        return processes_of(self._folder)

    def close(self) -> None:
        """Kill the agents, and wait until their processes have gone; only a failed run has any left."""
        for agent in self.agents:
            if agent.process is not None:
                agent.process.kill()
                agent.process.wait()


def processes_of(folder: Path) -> dict[int, str]:
    """Return the running processes whose environment has ``folder`` for their records, with their command lines."""
    mark = f"{FOLDER}={folder}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (process / "environ").read_bytes().split(b"\0"):
                continue
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (OSError, ProcessLookupError):
            continue  # it has just ended, or is another user's
        if _is_running(process):
            found[int(process.name)] = command
    return found


def _is_running(process: Path) -> bool:
    """Whether the process of a folder of ``/proc`` has not ended. One that has may remain until its parent asks; while other
    threads of it end, which keep its locks, its first one is shown as ended."""
    try:
        ended = (process / "stat").read_text().rpartition(") ")[2][:1] in "ZX"
        return not ended or len(list((process / "task").iterdir())) > 1
    except (OSError, ProcessLookupError):
        return False


def wait_until_gone(folder: Path, seconds: float, killed: Iterable[int] = ()) -> dict[int, str]:
    """Wait until no process of the job is left. Return those that still run after ``seconds``.

    Args:
        killed: processes of the job that were killed. While one ends, it has no environment any more, but still its locks.
    """
    end = time.monotonic() + seconds
    while True:
        left = processes_of(folder) | {pid: "killed" for pid in killed if _is_running(Path(f"/proc/{pid}"))}
        if not left or time.monotonic() >= end:
            return left
        time.sleep(0.05)


def _free_port() -> int:
    """Return a free port that the system gives to no connection: one below its range of ports for clients."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in range(max(1024, lowest - 1 - os.getpid() % 8000), 1024, -1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ChaosFailure("this machine has no free port")


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port of this machine."""
    found = set()
    for table in ("tcp", "tcp6"):
        file = Path("/proc/net") / table
        for line in file.read_text().splitlines()[1:] if file.exists() else []:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _sockets_of(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue  # closed since
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found
