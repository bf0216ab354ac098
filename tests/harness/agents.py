"""The launcher's agent, with scripts without torch in place of the ranks."""

from __future__ import annotations

import sys
import textwrap
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from titan_core.toolkit.launching import OUTCOMES
from titan_launch.agent import Agent
from titan_launch.meeting.machines import Machines
from titan_launch.meeting.meeting_point import handler
from titan_launch.meeting.rendezvous import Rendezvous, RendezvousClosed
from titan_launch.meeting.sizes import Plan, Sizes
from titan_launch.ranks.logs import RankLogs
from titan_launch.ranks.progress import StepLimits
from titan_launch.restart.policy import RestartLimits, RestartPolicy
from titan_launch.terminal.console import Console, Shown

KEY = b"the key of the machines of a test"
RANK = """
import json, os, signal, struct, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def leave(**values):
    path = os.environ["TITAN_OUTCOMES"] + f"/rank-{rank}.json"
    with open(path + ".part", "w") as file:
        json.dump({"rank": rank, "step": 15, "problems": [], **values}, file)
    os.replace(path + ".part", path)

def progress(begun, started, completed, seconds_ago=0.0):
    path = os.environ["TITAN_OUTCOMES"] + f"/rank-{rank}.progress"
    with open(path + ".part", "wb") as file:
        file.write(struct.pack("<qqqd", begun, started, completed, time.monotonic() - seconds_ago))
    os.replace(path + ".part", path)

def stay():
    while True:  # a signal just before a single long sleep is handled only after it
        time.sleep(0.05)

def others_left():
    while len(os.listdir(os.environ["TITAN_OUTCOMES"])) < 1:
        time.sleep(0.01)

"""

RANK_0 = Shown(frozenset({0}))


def agent_of(
    folder: Path,
    script: str,
    ranks: int = 2,
    restarts: int = 0,
    found: str | None = None,
    shown: Shown = RANK_0,
    console: Console | None = None,
    alone: Rendezvous | None = None,
    trains: bool = True,
    step_limits: StepLimits | None = None,
    sizes: Sizes | None = None,
    when_impossible: Literal["wait", "stop"] = "wait",
    grace: int = 120,
) -> Agent:
    """
    Args:
        alone: the options of one of several machines.
        sizes: the numbers of ranks on which an elastic job can train.
    """
    file = folder / "rank.py"
    file.write_text(RANK + textwrap.dedent(script))
    options = alone or Rendezvous()
    found_handler = handler(options) if options.endpoint else None
    console = console or Console()
    logs = RankLogs(folder / "logs", "the test", console, shown)
    return Agent(
        command=(sys.executable, "-S", str(file)),
        environment={OUTCOMES: str(folder / "outcomes")},
        machines=Machines(options, ranks, found_handler, console, sizes, when_impossible),
        outcomes=folder / "outcomes",
        logs=logs,
        console=console,
        diagnose=lambda began: found,
        restart_policy=RestartPolicy(RestartLimits(restarts, wait=0.1)),
        step_limits=step_limits,
        grace=grace,
        trains=trains,
        poll_seconds=0.02,
    )


class Peer:
    """Another machine of an elastic job, without ranks."""

    def __init__(self, options: Rendezvous, ranks: int, plan: Plan | None = None) -> None:
        """
        Args:
            plan: what it chooses if it is the first machine (default: all train).
        """
        self.handler, self._ranks, self._plan = handler(options), ranks, plan
        self.joined = False

    def join(self) -> threading.Thread:
        """Join the next round, in a thread."""
        thread = threading.Thread(target=self._join)
        thread.start()
        return thread

    def _join(self) -> None:
        try:
            here = self.handler.next_rendezvous()
        except RendezvousClosed:
            return
        self.handler.put(f"machine/{here.rank}", {"ranks": self._ranks, "batch": 0})
        self.handler.put(f"done/{here.rank}", True)
        if here.rank == 0:  # all machines have as many ranks as this one
            size = len(here.members)
            plan = self._plan or Plan(size, size * self._ranks)
            agreed = {"plan": asdict(plan), "ranks": [self._ranks] * size, "master": ["127.0.0.1", 1]}
            self.handler.put("plan", agreed)
        self.joined = True

    def fail(self, line: str) -> None:
        """Report a failure of this machine's ranks."""
        self.handler.put("failure", {"status": 1, "line": line})

    def end(self, status: int, line: str = "") -> None:
        """End the job, and report how."""
        self.handler.put("end", {"status": status, "line": line})
        self.close()

    def leave(self) -> None:
        """Leave the round."""
        self.handler.leave()

    def close(self) -> None:
        """End the job without a report."""
        self.handler.shutdown()
