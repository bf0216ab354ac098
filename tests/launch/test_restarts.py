"""Restarts and the ends that have none. Scripts without torch take the place of the ranks."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from harness.agents import agent_of
from titan_core.toolkit.launching import RESTART
from titan_launch.meeting.machines import Place
from titan_launch.meeting.rendezvous import RendezvousClosed
from titan_launch.ranks.progress import Progress, StepLimits
from titan_launch.restart import policy as restart_policy
from titan_launch.restart.failure import Failure
from titan_launch.restart.recovery import Restart, recovery_line

pytestmark = pytest.mark.usefixtures("environment", "handlers")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTART, "")  # restored afterwards


@pytest.mark.parametrize(
    ("script", "status", "line"),
    [
        ('leave(problems=["optimizer.lr: too large"], status=2); sys.exit(2)', 2,
         "error: optimizer.lr: too large; not restarted, because a restart would find the same mistake"),
        ("progress(0, 7, 7); sys.exit(66)", 66,
         "the data ended before the last step; not restarted, because there is no more data"),
        ('leave(problems=["stopped: the loss is nan"], status=65); sys.exit(65)', 65,
         "stopped: the loss is nan; not restarted, because a restart would meet the same numbers"),
        ('progress(3, 4, 3); leave(problems=["MemoryError: "], status=71); sys.exit(71)', 71,
         "error: MemoryError: ; not restarted, because it needs more memory than there is for its first step"),
    ],
    ids=["mistake", "end of the data", "numerics", "memory"],
)  # fmt: skip
def test_an_end_that_would_repeat_is_final(tmp_path: Path, script: str, status: int, line: str) -> None:
    agent = agent_of(tmp_path, script, restarts=3)
    agent.run()
    assert agent.failure is not None
    assert (agent.failure.status, agent.failure.lines) == (status, (line,))


def test_the_status_that_a_rank_recorded_counts_even_if_its_process_ended_otherwise(tmp_path: Path) -> None:
    script = """
    leave(problems=["AcceleratorError: CUDA error: uncorrectable ECC error"], status=74)
    os.kill(os.getpid(), signal.SIGABRT)
    """
    agent = agent_of(tmp_path, script, ranks=1)
    agent.run()
    assert agent.failure is not None and agent.failure.status == 74


def test_a_rank_that_waits_for_a_killed_one_does_not_delay_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("GRACE_SECONDS", "KILLED_SECONDS"):
        monkeypatch.setattr(restart_policy, name, 600.0)
    monkeypatch.setattr(restart_policy, "RECORDED_SECONDS", 0.0)
    script = """
    if attempt:
        open(__file__ + str(rank), "w").write(os.environ["TITAN_RESTART"])
        sys.exit(0)
    progress(4, 8, 7)
    if rank == 0:
        leave(problems=["RuntimeError: Connection closed by peer"], follows=True, status=69, time=time.time())
        stay()
    others_left()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    agent = agent_of(tmp_path, script, restarts=1)
    agent.run()
    assert agent.failure is None
    assert "rank 1 was killed by SIGKILL in step 15 (out of memory?)" in capfd.readouterr().err
    restart = Restart(**json.loads((tmp_path / "rank.py0").read_text()))
    assert restart.failed <= restart.noticed <= restart.ended <= restart.started
    assert restart.completed == 7


def test_ranks_that_do_not_end_their_step_are_killed_named_and_restarted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No rank waits in a collective, which would time out: rank 1 is stopped, rank 0 stuck."""
    script = """
    if attempt:
        sys.exit(0)
    progress(0, 3, 2, seconds_ago=100 if rank else 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    agent = agent_of(tmp_path, script, restarts=1, found="rank 1 is in next()", step_limits=StepLimits(1000.0, 90.0))
    agent.run()
    assert agent.failure is None
    said = r"titan: error: rank 1 was killed in step 3, which had taken 10\d s; rank 1 is in next\(\); restarting \("
    assert re.search(said, capfd.readouterr().err)


def test_the_first_step_and_the_time_between_steps_have_their_own_limits() -> None:
    limits = StepLimits(first=100.0, later=10.0)
    ranks = {
        0: Progress(begun=5, started=6, completed=5, time=950.0),
        1: Progress(begun=5, started=8, completed=7, time=950.0),
        2: Progress(begun=5, started=7, completed=7, time=0.0),  # saves or validates
    }
    assert limits.exceeded(ranks, now=1000.0) == {1: 50.0}
    assert limits.exceeded(ranks, now=1051.0).keys() == {0, 1}


@pytest.mark.full
def test_an_interrupt_ends_the_wait_before_a_restart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    agent = agent_of(tmp_path, "sys.exit(3)", ranks=1, restarts=3)
    agent.restart_policy._limits = restart_policy.RestartLimits(3, wait=600.0, longest_wait=600.0)
    said: list[str] = []
    original = agent.console.say

    def say(line: str) -> None:
        original(line)
        said.append(line)
        if "restarting in 600 s (attempt 3 of 4)" in line:
            signal.raise_signal(signal.SIGINT)

    agent.console.say = say  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        agent.run()
    assert len(said) >= 2


def test_the_cost_of_a_restart_in_one_line() -> None:
    restart = Restart(failed=100.0, noticed=100.3, ended=100.4, waited=0.0, started=100.6, completed=12)
    start = {"import": 4.5, "join": 0.2, "build": 1.5, "restore": 0.3, "first step": 0.7}
    assert recovery_line(restart, start, 107.9, resumed=10) == (
        "recovered in 7.9 s: detect 0.3, stop 0.1, rendezvous 0.2, import 4.5, join 0.2, build 1.5, restore 0.3, "
        "first step 0.7; 2 steps trained again"
    )
    waited = Restart(failed=100.0, noticed=100.0, ended=100.0, waited=5.0, started=105.1, completed=9)
    assert "wait 5.0, rendezvous 0.1" in recovery_line(waited, start, 112.0, resumed=10)
    assert recovery_line(waited, start, 112.0, resumed=8).endswith("; 1 step trained again")


@pytest.mark.parametrize(
    ("failure", "status", "line"),
    [
        (Failure(71, ("error: MemoryError",)), 71,
         "titan: error: MemoryError; not restarted, because the job has ended on another machine\n"),
        (None, 69, "titan: error: the job has ended on another machine, whose output says why\n"),
    ],
    ids=["failed here", "failed elsewhere"],
)  # fmt: skip
def test_a_job_that_has_ended_elsewhere_is_no_mistake_in_the_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    failure: Failure | None,
    status: int,
    line: str,
) -> None:
    """A machine of a job of fixed size restarts its ranks, and finds the rendezvous closed."""

    def meet(has_trained: bool) -> Place:
        if has_trained:
            agent.failure = failure
            raise RendezvousClosed
        return original(has_trained)

    agent = agent_of(tmp_path, "sys.exit(3)", ranks=1, restarts=3)
    original = agent.machines.meet
    monkeypatch.setattr(agent.machines, "meet", meet)
    assert agent.run() == status
    assert capfd.readouterr().err.endswith(line)


def test_a_failure_is_not_held_up_by_a_rank_that_has_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 completes; later, rank 1 fails, and rank 2 waits for it until it is killed."""
    monkeypatch.setattr(restart_policy, "patience", lambda ended, *given: 600.0 if len(ended) < 2 else 0.0)
    script = """
    def has_ended(number):
        try:
            pid = open(__file__ + str(number)).read()
        except FileNotFoundError:
            return False
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    if rank == 1:
        while not has_ended(0):
            time.sleep(0.01)
        leave(problems=["ValueError: no"], time=1.0)
        sys.exit(1)
    open(__file__ + str(rank) + ".part", "w").write(str(os.getpid()))
    os.replace(__file__ + str(rank) + ".part", __file__ + str(rank))
    if rank == 2:
        stay()
    """
    agent = agent_of(tmp_path, script, ranks=3)
    agent.run()
    assert agent.failure == Failure(1, ("error: ValueError: no",))
