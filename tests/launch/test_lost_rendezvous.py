"""The machine that hosts the rendezvous may go while the ranks of another one train."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers

from harness.agents import KEY, agent_of
from titan_core.toolkit.errors import EXIT_LOST_PEER
from titan_launch.launch import _run
from titan_launch.rendezvous import Rendezvous

pytestmark = pytest.mark.usefixtures("environment", "handlers")


def test_the_loss_of_the_rendezvous_is_that_of_a_peer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not a mistake of the user, after which no supervisor would start the machine again."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    options = Rendezvous(f"127.0.0.1:{stores[0].port}", "lost", (1, 1), 60, key=KEY)
    agent = agent_of(tmp_path, "open(__file__ + '.began', 'w').close()\ntime.sleep(600)", ranks=1, alone=options)

    def lose() -> None:
        while not (tmp_path / "rank.py.began").exists():
            time.sleep(0.01)
        stores.clear()

    losing = threading.Thread(target=lose)
    losing.start()
    assert _run(agent, options) == EXIT_LOST_PEER
    losing.join()
    error = capfd.readouterr().err
    assert f"titan: error: --rdzv-endpoint {options.endpoint}: the rendezvous is lost (" in error
    assert "Traceback" not in error
