"""The launcher's agent, with scripts without torch in place of the ranks."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

from titan_launch.agent import RankAgent
from titan_launch.console import Console, Shown
from titan_launch.rank_logs import RankLogs
from titan_launch.rendezvous import Rendezvous, handler

RANK = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def leave(**values):
    path = os.environ["TITAN_OUTCOMES"] + f"/rank-{rank}.json"
    with open(path + ".part", "w") as file:
        json.dump({"rank": rank, "step": 15, "problems": [], **values}, file)
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
) -> RankAgent:
    """
    Args:
        alone: the options of one of several machines.
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
    return RankAgent(
        spec, options.machines, options.endpoint, folder / "outcomes", logs, console, lambda began: found, trains
    )
