"""The launcher's agent, with scripts without torch in place of the ranks."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousHandler

from titan_launch.agent import RankAgent
from titan_launch.console import Console, Shown
from titan_launch.elastic import ElasticAgent
from titan_launch.progress import StepLimits
from titan_launch.rank_logs import RankLogs
from titan_launch.rendezvous import Rendezvous, handler
from titan_launch.restart_policy import RestartLimits
from titan_launch.sizes import Sizes
from titan_launch.torch_private import leave

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
        file.write(struct.pack("<qqqd", begun, started, completed, time.time() - seconds_ago))
    os.replace(path + ".part", path)

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
    fixed_last_call: bool = True,
    grace: int = 120,
) -> RankAgent:
    """
    Args:
        alone: the options of one of several machines.
        sizes: the numbers of ranks on which an elastic job can train.
    """
    file = folder / "rank.py"
    file.write_text(RANK + textwrap.dedent(script))
    options = alone or Rendezvous("c10d", "", "", (1, 1), 0, 60)
    rendezvous: RendezvousHandler = handler(options, f"test-{os.getpid()}")
    spec = WorkerSpec(
        role="rank", local_world_size=ranks, entrypoint=sys.executable, args=("-S", str(file)),
        rdzv_handler=rendezvous, max_restarts=restarts, monitor_interval=0.02,
    )  # fmt: skip
    console = console or Console()
    logs = RankLogs(folder / "torch", folder / "logs", "the test", console, shown)
    of_agent = (
        spec, options.machines, options.endpoint, folder / "outcomes", logs, console, lambda began: found, trains,
        RestartLimits(restarts, wait=0.1), step_limits, grace,
    )  # fmt: skip
    if sizes is None:
        return RankAgent(*of_agent)
    agent = ElasticAgent(
        *of_agent, sizes=sizes, when_impossible=when_impossible, timeout=options.timeout, fixed_last_call=fixed_last_call
    )
    agent._exit_barrier_timeout = 0.1  # peers have no ranks that end
    return agent


class Peer:
    """Another machine of an elastic job, without ranks."""

    def __init__(self, options: Rendezvous, ranks: int) -> None:
        self._handler, self._ranks = handler(options, ""), ranks
        self.store: Any = None

    def join(self) -> threading.Thread:
        """Join the next round, in a thread."""
        thread = threading.Thread(target=self._join)
        thread.start()
        return thread

    def _join(self) -> None:
        try:
            round_ = self._handler.next_rendezvous()
        except RendezvousClosedError:
            return
        self.store = round_.store
        role = {"role": "rank", "rank": round_.rank, "local_world_size": self._ranks}
        self.store.set(f"torchelastic/role_info/{round_.rank}", json.dumps(role))  # torch's agent expects it
        if round_.rank == 0:  # all machines have as many ranks as this one
            size = round_.world_size * self._ranks
            for number in range(round_.world_size):
                first = number * self._ranks
                self.store.set(f"torchelastic/assigned_ranks/{number}", json.dumps([first, size, first, size]))
        self.store.set(f"titan/machine/{round_.rank}", json.dumps({"ranks": self._ranks, "batch": 0}))

    def fail(self, line: str) -> None:
        """Report a failure of this machine's ranks."""
        self.store.set("titan/failure", json.dumps({"status": 1, "line": line}))

    def end(self, status: int, line: str = "") -> None:
        """End the job, and report how."""
        self.store.set("titan/end", json.dumps({"status": status, "line": line}))
        self.close()

    def leave(self) -> None:
        """Leave the round."""
        leave(self._handler, 10.0)

    def close(self) -> None:
        """End the job without a report."""
        self._handler.shutdown()
