"""Signals to the launcher: which of them end the job, and what the ranks get. Scripts without torch are the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from harness.agents import agent_of
from titan_core.api import hookimpl
from titan_core.cli.main import main
from titan_core.plugins.guard import Origin
from titan_core.toolkit.errors import EXIT_INTERRUPTED, EXIT_LOST_PEER
from titan_launch import launch
from titan_launch.agent import Agent
from titan_launch.meeting.rendezvous import RendezvousLost
from titan_launch.meeting.sizes import Sizes
from titan_launch.ranks.attempt import Attempt
from titan_launch.restart import policy as restart_policy
from titan_launch.terminal.signals import Signals, Terminated

pytestmark = pytest.mark.usefixtures("environment", "handlers")
SAVES = """
def save(*given):
    leave(checkpoint="step-15")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
"""
"""Ranks that save on SIGTERM, and on no other signal."""


def elastic_agent_of(folder: Path, script: str, grace: int = 120) -> Agent:
    sizes = Sizes(lambda ranks, overrides: pytest.fail("no size is needed"))
    return agent_of(folder, script, ranks=1, sizes=sizes, grace=grace)


@pytest.fixture
def ending() -> Iterator[Signals]:
    """Signals of a launcher without ranks, handled."""
    with Signals(lambda: False) as signals:
        yield signals


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long ranks may take to end before SIGKILL, each time."""
    waited: list[int] = []
    close = Attempt.close

    def record(self: Attempt, number: signal.Signals, seconds: int) -> object:
        if number is signal.SIGTERM:
            waited.append(seconds)
        return close(self, number, seconds)

    monkeypatch.setattr(Attempt, "close", record)
    return waited


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU])
def test_ranks_save_whatever_signal_ends_the_launcher(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"{SAVES}os.kill(os.getppid(), {int(number)})\nstay()"
    agent = agent_of(tmp_path, script, ranks=1, restarts=3)
    assert agent.run() == 128 + number
    assert [outcome.checkpoint for outcome in agent._outcomes()] == ["step-15"]
    assert f"titan: ended by {number.name}\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, *(pytest.param(one, marks=pytest.mark.full) for one in (signal.SIGINT, signal.SIGQUIT))]
)
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(tmp_path: Path, number: signal.Signals) -> None:
    """As under ``nohup``, and in the background of a shell script."""
    signal.signal(number, signal.SIG_IGN)
    agent = agent_of(tmp_path, f"os.kill(os.getppid(), {int(number)})\nleave()", ranks=1)
    assert agent.run() == 0
    assert signal.getsignal(number) is signal.SIG_IGN


def test_sigpipe_says_nothing_to_a_launcher(tmp_path: Path) -> None:
    """Python ignores it, and meets the closed pipe when it writes."""
    agent = agent_of(tmp_path, f"os.kill(os.getppid(), {int(signal.SIGPIPE)})\nleave()", ranks=1)
    assert agent.run() == 0


def test_the_handlers_of_the_application_come_back(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGURG)}
    agent_of(tmp_path, "", ranks=1).run()
    assert {number: signal.getsignal(number) for number in before} == before
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ


def test_a_scheduler_that_repeats_sigterm_does_not_shorten_a_save(tmp_path: Path) -> None:
    script = """
    def save(*given):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.1)  # the launcher would end now, and this process with it
        leave(checkpoint="step-15")
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    os.kill(os.getppid(), signal.SIGTERM)
    stay()
    """
    agent = agent_of(tmp_path, script, ranks=1)
    assert agent.run() == 128 + signal.SIGTERM
    assert [outcome.checkpoint for outcome in agent._outcomes()] == ["step-15"]


@pytest.mark.parametrize("agent_with", [agent_of, elastic_agent_of], ids=["fixed", "elastic"])
def test_an_interrupt_after_the_loss_of_the_rendezvous_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent_with: Callable[[Path, str], Agent]
) -> None:
    """The processes that the ranks were have been reaped, and their numbers may be those of others."""
    agent = agent_with(tmp_path, "stay()")
    monkeypatch.setattr(agent.machines, "others_wait", Mock(side_effect=RendezvousLost))
    monkeypatch.setattr(agent.machines, "reconnect", lambda: signal.raise_signal(signal.SIGINT))
    with agent.signals, pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the handlers are those of one job
        assert agent.run() == EXIT_LOST_PEER  # an elastic job waits for the rendezvous
        signal.raise_signal(signal.SIGINT)
    assert agent.interrupts == 0


def test_an_interrupt_before_the_loss_of_the_rendezvous_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = elastic_agent_of(tmp_path, "stay()")

    def loses() -> bool:
        signal.raise_signal(signal.SIGINT)
        raise RendezvousLost

    monkeypatch.setattr(agent.machines, "others_wait", loses)
    assert (agent.run(), agent.interrupts) == (EXIT_INTERRUPTED, 1)


@pytest.mark.parametrize("agent_with", [agent_of, elastic_agent_of], ids=["fixed", "elastic"])
def test_ranks_that_are_interrupted_while_they_stop_are_not_started_again(
    tmp_path: Path, agent_with: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
    def save(*given):
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.1)
        sys.exit(75)
    if os.path.exists(__file__ + ".asked"):
        sys.exit(0)  # started again
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, save)
    open(__file__ + ".began", "w").close()
    stay()
    """
    agent = agent_with(tmp_path, script)

    def joins() -> bool:
        asked = tmp_path / "rank.py.asked"
        if asked.exists() or not (tmp_path / "rank.py.began").exists():
            return False
        asked.touch()
        return True

    monkeypatch.setattr(agent.machines, "others_wait", joins)
    assert agent.run() == EXIT_INTERRUPTED
    assert agent.interrupts > 0


def test_the_launcher_ends_although_a_signal_comes_while_a_plugin_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Plugin:
        @hookimpl
        def titan_diagnose(self, run: str, since: float) -> None:
            signal.raise_signal(signal.SIGTERM)

    job: Any = SimpleNamespace(
        registry=SimpleNamespace(modules=lambda: [(Plugin(), Origin("odd", "titan-odd", "1"))]), dump_folder="run"
    )
    agent = agent_of(tmp_path, "sys.exit(3)", ranks=1, restarts=3)
    agent.diagnose = lambda began: launch._diagnose(job, began)
    assert agent.run() == 128 + signal.SIGTERM


def test_a_plugin_that_a_signal_ends_has_not_failed(ending: Signals) -> None:
    with pytest.raises(Terminated, match="SIGTERM"):
        Origin("mine", "mine", "1.0").call("build", signal.raise_signal, signal.SIGTERM)


def test_a_size_whose_check_a_signal_ends_is_not_impossible(ending: Signals) -> None:
    sizes = Sizes(lambda ranks, overrides: Origin("a", "a", "1").call("check", signal.raise_signal, signal.SIGTERM))
    with pytest.raises(Terminated):
        sizes.on(4)
    assert not sizes._found


def test_a_signal_waits_until_the_ranks_have_started(ending: Signals) -> None:
    done = False
    with pytest.raises(Terminated, match="SIGHUP"), ending.deferred():  # noqa: PT012 - the block must complete
        with ending.deferred():
            signal.raise_signal(signal.SIGHUP)
        done = True
    assert done
    with pytest.raises(KeyboardInterrupt), ending.deferred():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("agent_with", [agent_of, elastic_agent_of], ids=["fixed", "elastic"])
def test_ranks_have_the_time_that_the_user_gives(
    tmp_path: Path, seconds: list[int], agent_with: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_with(tmp_path, "if os.path.exists(__file__ + '.again'): sys.exit()\nstay()", grace=77)

    def joins() -> bool:
        (tmp_path / "rank.py.again").touch()
        return not seconds

    monkeypatch.setattr(agent.machines, "others_wait", joins)
    assert agent.run() == 0
    assert seconds == [77, 77]  # once more at the end, when no rank is left


def test_ranks_have_that_time_when_the_launcher_ends(tmp_path: Path, seconds: list[int]) -> None:
    script = "os.kill(os.getppid(), signal.SIGTERM)\nstay()"
    assert agent_of(tmp_path, script, ranks=1, grace=77).run() == 128 + signal.SIGTERM
    assert seconds == [77]


def test_ranks_have_that_time_when_another_has_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "GRACE_SECONDS", 600.0)
    agent = agent_of(tmp_path, "if rank == 0: sys.exit(75)\nstay()", grace=0)
    assert agent.run() == 75


@pytest.mark.parametrize(("options", "grace"), [([], 120), (["--grace", "600"], 600)])
def test_the_option_reaches_the_agent(in_tmp: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], grace: int) -> None:
    started: list[Agent] = []
    monkeypatch.setattr(Agent, "run", lambda agent: started.append(agent) or 0)
    assert main(["train", "tiny", "--nproc-per-node", "2", *options]) == 0
    assert [agent.grace for agent in started] == [grace]
