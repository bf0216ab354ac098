"""How the launcher reacts to ranks that end. Scripts without torch take the place of the ranks."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers

from harness.agents import KEY, agent_of
from titan_core.api import UserError
from titan_core.toolkit.errors import EXIT_INTERRUPTED, EXIT_LOST_PEER
from titan_core.toolkit.launching import (
    INTERRUPTED,
    Outcome,
    announce_interrupt,
    interrupted_line,
    report_lines,
    resume_line,
)
from titan_launch.agent import Agent
from titan_launch.meeting.rendezvous import Rendezvous
from titan_launch.ranks.attempt import Attempt
from titan_launch.restart import policy as restart_policy
from titan_launch.restart.failure import Evidence, Failure, failure_of

pytestmark = pytest.mark.usefixtures("environment", "handlers")
LOST = 'leave(problems=["RuntimeError: Timed out waiting 20000ms for recv"], follows=True, log="logs/rank-0.log", time=1.0)'


def last_line(agent: Agent) -> str:
    agent.run()
    assert agent.failure is not None
    return agent.failure.lines[-1]


@pytest.mark.parametrize(
    ("found", "reported"),
    [
        ("see `titan analyse RUN`", "see `titan analyse RUN`"),
        (None, "the traceback of rank 0, which waited for it, is in logs/rank-0.log"),
    ],
    ids=["with a diagnosis", "without a diagnosis"],
)
def test_a_rank_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, reported: str
) -> None:
    monkeypatch.setattr(restart_policy, "GRACE_SECONDS", 0.0)
    script = f"""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    {LOST}
    sys.exit(1)
    """
    line = last_line(agent_of(tmp_path, script, found=found))
    assert line == f"error: rank 1 has not answered for 20 s in step 15; {reported}"


def test_the_first_cause_is_named_even_if_a_waiting_rank_ended_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"""
    if rank == 0:
        {LOST}
        sys.exit(1)
    others_left()
    if attempt == 0:
        leave(problems=["ValueError: no"], log="logs/rank-1.log", time=2.0)
        sys.exit(1)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    agent = agent_of(tmp_path, script, restarts=1)
    log = tmp_path / "logs/rank-1.log"
    assert last_line(agent) == f"error: rank 1 was killed by SIGKILL in step 15 (out of memory?); see {log}"
    assert agent.failure is not None and agent.failure.status == 137
    expected = "error: rank 1 in step 15: ValueError: no; the traceback is in logs/rank-1.log; restarting (attempt 2 of 2)"
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("titan: ")]
    assert printed == [f"titan: {expected}", f"titan: {agent.failure.lines[-1]}"]


def test_an_interrupt_reaches_every_rank_and_the_agent_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = """
    def stop(*given):
        leave(interrupted=True, checkpoint="step-15")
        sys.exit(0)
    signal.signal(signal.SIGINT, stop)
    open(__file__ + str(rank), "w").close()
    if rank == 0:
        while not os.path.exists(__file__ + "1"):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGINT)
    stay()
    """
    agent = agent_of(tmp_path, script, restarts=3)
    assert agent.run() == EXIT_INTERRUPTED
    assert agent.failure is None and agent.interrupts == 1
    error = capfd.readouterr().err
    assert (
        "Ctrl-C again ends at once" in error and "titan: interrupted after step 15, saved in step-15; to resume: " in error
    )


def test_a_second_interrupt_ends_the_job_at_once_without_a_restart(tmp_path: Path) -> None:
    script = """
    def first(*given):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getppid(), signal.SIGINT)
    signal.signal(signal.SIGINT, first)
    os.kill(os.getppid(), signal.SIGINT)
    stay()
    """
    agent = agent_of(tmp_path, script, ranks=1, restarts=3)
    assert agent.run() == EXIT_INTERRUPTED
    assert agent.interrupts == 2


@pytest.mark.parametrize(("trains", "line"), [(True, INTERRUPTED), (False, "titan: interrupted: ending the ranks; ")])
def test_an_interrupt_says_what_the_ranks_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], trains: bool, line: str
) -> None:
    """Ranks that train complete their step; those that generate or evaluate end at once."""
    agent = agent_of(tmp_path, "os.kill(os.getppid(), signal.SIGINT)\nstay()", ranks=1, trains=trains)
    assert agent.run() == EXIT_INTERRUPTED
    assert line in capfd.readouterr().err


def test_the_first_interrupt_shows_the_cursor_because_a_second_one_kills_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    announce_interrupt(INTERRUPTED)
    assert capfd.readouterr().err == f"\r\x1b[2K\x1b[?25h{INTERRUPTED}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    announce_interrupt(INTERRUPTED)
    assert capfd.readouterr().err == f"{INTERRUPTED}\n"


def test_a_rank_that_fails_after_an_interrupt_is_reported_and_not_restarted(tmp_path: Path) -> None:
    script = """
    def stop(*given):
        leave(problems=["step-15: cannot be written; make room"])
        sys.exit(2)
    signal.signal(signal.SIGINT, stop)
    os.kill(os.getppid(), signal.SIGINT)
    stay()
    """
    agent = agent_of(tmp_path, script, ranks=1, restarts=3)
    assert agent.run() == 2
    assert agent.failure == Failure(2, ("error: step-15: cannot be written; make room",))


def test_fewer_machines_than_requested_are_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agent = agent_of(tmp_path, "", alone=Rendezvous(f"127.0.0.1:{port}", "test", (1, 1), 60, "127.0.0.1", key=KEY))
    agent.machines.options = replace(agent.machines.options, machines=(2, 3))
    with pytest.raises(UserError, match=r"--nnodes 2:3: 1 machine\(s\) joined the rendezvous"):
        agent.run()


def test_the_loss_of_the_rendezvous_is_that_of_a_peer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not a mistake of the user, after which no supervisor would start the machine again."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    options = Rendezvous(f"127.0.0.1:{stores[0].port}", "lost", (1, 1), 60, key=KEY)
    agent = agent_of(tmp_path, "open(__file__ + '.began', 'w').close()\nstay()", ranks=1, alone=options)

    def lose() -> None:
        while not (tmp_path / "rank.py.began").exists():
            time.sleep(0.01)
        stores.clear()

    losing = threading.Thread(target=lose)
    losing.start()
    assert agent.run() == EXIT_LOST_PEER
    losing.join()
    error = capfd.readouterr().err
    assert f"titan: error: --rdzv-endpoint {options.endpoint}: the rendezvous is lost (" in error
    assert "Traceback" not in error


def outcome(rank: int, problem: str = "", follows: bool = False, at: float = 1.0, log: str = "") -> Outcome:
    return Outcome(rank, 7, problems=(problem,) if problem else (), follows=follows, log=log, time=at)


LOST_ONE = outcome(0, "RuntimeError: Connection closed by peer", follows=True)


SHORTER = " (a file of the dataset was truncated while it was read, its disk has failed, or /dev/shm is full?)"


@pytest.mark.parametrize(
    ("statuses", "outcomes", "status", "lines"),
    [
        ({1: -9, 0: 1}, [LOST_ONE], 137, ["error: rank 1 was killed by SIGKILL in step 7 (out of memory?); see rank-1.log"]),
        ({1: -7}, [], 135, [f"error: rank 1 was killed by SIGBUS{SHORTER}; see rank-1.log"]),
        ({1: -11, 2: -11}, [], 139, ["error: ranks 1-2 were killed by SIGSEGV; see rank-1.log"]),
        # NCCL's watchdog aborts ranks that have lost another.
        ({0: -6, 1: -11}, [LOST_ONE], 139, ["error: rank 1 was killed by SIGSEGV in step 7; see rank-1.log"]),
        ({1: -6}, [outcome(2, "ValueError: no")], 1,
         ["error: rank 1 was killed by SIGABRT in step 7; see rank-1.log", "error: ValueError: no"]),
        ({1: 3}, [], 3, ["error: rank 1 exited with status 3 and recorded no reason; see rank-1.log"]),
        ({0: 2, 1: 2}, [outcome(0, "the data: bad; fix it"), outcome(1, "the data: bad; fix it")], 2,
         ["error: the data: bad; fix it"]),
        ({0: 1}, [outcome(0, "stopped: step 3: the loss is nan")], 1, ["stopped: step 3: the loss is nan"]),
        ({0: 1, 1: 1}, [outcome(0, "KeyError: 'a'", at=2.0), outcome(1, "ValueError: no", log="l")], 1,
         ["error: KeyError: 'a'", "error: rank 1 in step 7: ValueError: no; the traceback is in l"]),
        ({0: 2, 1: 3}, [outcome(0, "KeyError: 'a'", at=2.0), outcome(1, "ValueError: no", log="l")], 3,
         ["error: KeyError: 'a'", "error: rank 1 in step 7: ValueError: no; the traceback is in l"]),
        ({0: 75, 1: 75}, [], 75, ["ranks 0-1 stopped on SIGTERM; the job can be restarted"]),
        ({0: 69}, [LOST_ONE], 69, ["error: ranks 1-3 have not answered in step 7"]),
    ],
)  # fmt: skip
def test_the_first_cause_comes_last(
    statuses: dict[int, int], outcomes: list[Outcome], status: int, lines: list[str]
) -> None:
    logs = {rank: f"rank-{rank}.log" for rank in range(4)}
    found = failure_of(Evidence(statuses, logs, {outcome.rank: outcome for outcome in outcomes}), lambda: None)
    assert found == Failure(status, tuple(lines))


def test_ranks_with_the_same_problem_share_a_line() -> None:
    outcomes = [outcome(rank, "ValueError: no", log=f"logs/rank-{rank}.log", at=5.0 - rank) for rank in (0, 1, 2, 4)]
    assert list(report_lines(outcomes)) == [
        "error: ranks 0-2, 4 in step 7: ValueError: no; the traceback is in logs/rank-4.log"
    ]


def test_outcomes_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "rank-3.json").write_text(json.dumps({"rank": 3, "problems": ["a", "b"], "follows": True}))
    assert Attempt([], {}, {}, tmp_path).outcomes == {3: Outcome(3, problems=("a", "b"), follows=True)}


@pytest.mark.parametrize(
    ("ended", "line"),
    [
        (Outcome(0, 7, begun=2, checkpoint="c/step-7"), "interrupted after step 7, saved in c/step-7; to resume: titan x"),
        (Outcome(0, 7, begun=2), "interrupted after step 7; nothing was saved: checkpoints are disabled"),
        (Outcome(0, 7, begun=7), "interrupted before step 8; nothing was trained since the start"),
    ],
)
def test_an_interrupted_run_says_how_to_resume(ended: Outcome, line: str) -> None:
    assert interrupted_line(ended, "titan x").startswith(line)


@pytest.mark.parametrize(
    ("ended", "line"),
    [
        ([Outcome(0, step=3), Outcome(1, step=3)], ""),
        ([Outcome(0, step=3, begun=2)], "to resume from the newest checkpoint: titan x"),
        ([Outcome(0, step=3), Outcome(1, step=3, checkpoint="run/step-2")], "to resume from the newest checkpoint: titan x"),
    ],
    ids=["no checkpoint", "resumed", "saved"],
)
def test_a_failed_run_with_a_checkpoint_says_how_to_resume(ended: list[Outcome], line: str) -> None:
    assert resume_line(ended, "titan x") == line
