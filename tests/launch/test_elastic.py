"""Elastic jobs: which sizes can train, and how an agent reacts to machines that leave, join and fail.

Scripts without torch take the place of the ranks, and handlers of the same rendezvous that of other machines.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers

from harness.agents import KEY, Peer, agent_of
from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_core.cli.invocation import Invocation
from titan_core.plugins.registry import Components
from titan_core.toolkit.errors import EXIT_BAD_DEVICE, EXIT_LOST_PEER
from titan_launch.meeting import machines as meeting
from titan_launch.meeting.machines import Place
from titan_launch.meeting.meeting_point import handler
from titan_launch.meeting.rendezvous import Rendezvous, RendezvousClosed
from titan_launch.meeting.sizes import Sizes, choose
from titan_launch.restart import policy as restart_policy
from titan_launch.restart.failure import Failure

pytestmark = pytest.mark.usefixtures("environment", "handlers")
A, B, C = "127.0.0.1", "127.0.0.2", "127.0.0.3"
ENDS = """
world = os.environ["WORLD_SIZE"]
open(os.path.dirname(__file__) + f"/started-{world}-{rank}", "w").write(" ".join(sys.argv[1:]))
"""
"""Ranks that leave a file and end."""


def sizes(**values: object) -> Sizes:
    """The recipe of the tests on any number of ranks, with ``section.key`` written as ``section__key``."""
    own = [Override(key.replace("__", "."), str(value)) for key, value in values.items()]
    return Sizes(Invocation(argparse.Namespace(recipe="tiny"), Components.from_installed(), own).job)


def machines(least: int, most: int, address: str, last_call: int | None = 1) -> Callable[..., Rendezvous]:
    """Return a function that returns the options of a machine. Machines wait ``last_call`` seconds for further ones."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    conf = {"keep_alive_interval": 1, "keep_alive_max_attempt": 60}
    if last_call is not None:
        conf["last_call_timeout"] = last_call

    def options(address: str = address, timeout: int = 60) -> Rendezvous:
        return Rendezvous(f"127.0.0.1:{port}", "test", (least, most), timeout, address, key=KEY, conf=conf)

    return options


def test_the_batch_stays_and_the_rest_adapts(in_tmp: Path) -> None:
    """The recipe: a global batch of 16 in local batches of 4."""
    plans = {ranks: found.batch for ranks in (1, 2, 4, 8) if not isinstance(found := sizes().on(ranks), UserError)}
    assert {ranks: (plan.global_size, plan.local_size, plan.microbatches) for ranks, plan in plans.items()} == {
        1: (16, 4, 4), 2: (16, 4, 2), 4: (16, 4, 1), 8: (16, 2, 1),
    }  # fmt: skip


def test_a_fixed_shard_degree_makes_the_replicas_follow_the_ranks(in_tmp: Path) -> None:
    found = sizes(parallelism__data_parallel_shard_degree=2)
    meshes = {ranks: found.on(ranks) for ranks in (2, 4, 3)}
    shown = {ranks: str(job) if isinstance(job, UserError) else str(job.mesh) for ranks, job in meshes.items()}
    assert shown[2] == "dp_shard=2" and shown[4] == "dp_replicate=2 x dp_shard=2"
    assert "the degrees multiply to 2" in shown[3]


def test_the_batch_of_the_first_start_counts(in_tmp: Path) -> None:
    """The recipe leaves it open, and the run's directory knows it."""
    found = sizes(training__global_batch_size=-1, job__dump_folder="run")
    first = found.on(4)
    assert not isinstance(first, UserError) and first.batch.global_size == 16
    (in_tmp / "run").mkdir()
    (in_tmp / "run/config.toml").write_text("[training]\nelastic = true\nglobal_batch_size = 16\n")
    later = found.on(2)
    assert not isinstance(later, UserError) and later.batch.global_size == 16
    assert later.config.value("training.global_batch_size") == 16
    (in_tmp / "run/config.toml").write_text("[training]\nglobal_batch_size = 16\n")  # not an elastic run
    other = found.on(1)
    assert not isinstance(other, UserError) and other.batch.global_size == 4


def test_every_size_of_the_range_is_checked(in_tmp: Path) -> None:
    job, line = sizes(parallelism__tensor_parallel_degree=2).check(1, (1, 4))
    assert job.mesh.world_size == 4
    assert line.startswith(
        "elastic job: 2, 4 machine(s) of 1 rank(s) can train with a global batch of 16; 1, 3 cannot (1 machine(s): command"
    )
    assert "the degrees multiply to 2" in line
    with pytest.raises(UserError, match="the degrees multiply to 8"):
        sizes(parallelism__tensor_parallel_degree=8).check(1, (1, 4))


def test_the_largest_possible_number_of_machines_trains(in_tmp: Path) -> None:
    found = sizes(parallelism__tensor_parallel_degree=2)
    plan = choose(found, [1, 1, 1], 1, 0)
    assert (plan.machines, plan.ranks, plan.batch) == (2, 2, 16)
    assert plan.why.startswith("3 rank(s) cannot train: ")
    assert choose(found, [2, 2, 2], 1, 16).machines == 2  # 16 sequences cannot be divided by 3
    assert choose(found, [1, 3], 1, 0).ranks == 4  # machines may differ
    assert choose(found, [1], 1, 0).machines == 0
    assert choose(found, [1, 1, 1], 3, 0).machines == 0  # fewer than --nnodes allows


def test_ranks_restart_on_the_machines_that_are_left(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks that wait for lost ones are killed, and the restart does not count: there is none left. Its cost is counted from
    now, because no rank of this machine has failed."""
    began = time.time()
    monkeypatch.setattr(restart_policy, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(meeting, "LAST_CALL_SECONDS", 0.5)  # when they meet again
    options = machines(1, 2, A, last_call=None)
    cost = 'open(__file__ + ".restart", "w").write(os.environ["TITAN_RESTART"])'
    script = f"{ENDS}if world == '4': stay()\n{cost}"
    agent = agent_of(in_tmp, script, alone=options(), sizes=sizes())
    peer = Peer(options(B), 2)
    joining = peer.join()

    def leaves() -> bool:
        if (in_tmp / "started-4-1").exists() and peer.joined:
            joining.join()
            peer.fail("error: rank 3 was killed by SIGKILL in step 7")
            peer.leave()
            peer.joined = False
        return lost()

    lost = agent.machines.lost
    monkeypatch.setattr(agent.machines, "lost", leaves)
    assert agent.run() == 0
    assert (in_tmp / "started-2-1").read_text() == "--training.elastic true --training.global_batch_size 16"
    said = "titan: 127.0.0.2 left; restarting: 4 -> 2 ranks (dp_shard=2), 2 accumulation steps, global batch 16\n"
    assert said in capfd.readouterr().err
    restart = json.loads((in_tmp / "rank.py.restart").read_text())
    assert began < restart["failed"] <= restart["noticed"] <= restart["ended"] <= restart["started"]


LOSES = 'leave(problems=["RuntimeError: Connection closed by peer"], follows=True, time=1.0)\nsys.exit(1)'


@pytest.mark.full
def test_a_failure_of_another_machine_does_not_count(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = machines(2, 3, A)
    script = ENDS + f"if os.path.exists(__file__ + '.again'): sys.exit()\n{LOSES}"
    agent = agent_of(in_tmp, script, alone=options(), sizes=sizes())
    peer = Peer(options(B), 2)
    joining = [peer.join()]
    meet = agent.machines.meet

    def again(has_trained: bool) -> Place:
        if has_trained:
            joining[0].join()
            peer.fail("error: rank 3 was killed by SIGKILL in step 7 (out of memory?); see logs/rank-3.log")
            (in_tmp / "rank.py.again").touch()
            joining.append(peer.join())
        return meet(has_trained)

    monkeypatch.setattr(agent.machines, "meet", again)
    assert agent.run() == 0
    joining[1].join()
    said = (
        "titan: on another machine: rank 3 was killed by SIGKILL in step 7 (out of memory?); see logs/rank-3.log; restarting"
    )
    assert said in capfd.readouterr().err


LOST_MEMORY = "error: rank 0: OutOfMemoryError: CUDA out of memory"
ENDINGS = [
    ((0, ""), None),
    ((71, LOST_MEMORY), Failure(71, (f"error: on another machine: {LOST_MEMORY.removeprefix('error: ')}",))),
    (None, Failure(69, ("error: the job has ended on the other machines, and none says why",))),
]


@pytest.mark.full
@pytest.mark.parametrize(("end", "failure"), ENDINGS[:2], ids=["complete", "failed"])
def test_ranks_that_follow_end_like_the_job(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, end: tuple[int, str], failure: Failure | None
) -> None:
    """The other machine does not restart its ranks, but ends the job."""
    options = machines(2, 3, A)
    agent = agent_of(in_tmp, ENDS + LOSES, alone=options(), sizes=sizes())
    peer = Peer(options(B), 2)
    joining, meet = peer.join(), agent.machines.meet

    def again(has_trained: bool) -> Place:
        if has_trained:
            joining.join()
            peer.end(*end)
        return meet(has_trained)

    monkeypatch.setattr(agent.machines, "meet", again)
    assert agent.run() == end[0]
    assert agent.failure == failure


@pytest.mark.full
def test_a_failure_counts_although_a_machine_joins_before_all_ranks_have_ended(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = machines(1, 2, A)
    script = f"""{ENDS}
if rank == 0:
    leave(problems=["ValueError: no"], time=1.0)
    sys.exit(1)
while not os.path.exists(__file__ + ".joined"):
    time.sleep(0.01)
{LOSES}"""
    agent = agent_of(in_tmp, script, alone=options(), sizes=sizes())
    peer, joining = Peer(options(B), 2), []

    def patience(*given: object) -> float:
        if not joining:
            joining.append(peer.join())
            while not agent.machines.others_wait():
                time.sleep(0.05)
            (in_tmp / "rank.py.joined").touch()
        return 600.0

    monkeypatch.setattr(restart_policy, "patience", patience)
    agent.run()
    assert agent.failure == Failure(1, ("error: ValueError: no",)) and not (in_tmp / "started-4-0").exists()
    peer.close()
    joining[0].join()


@pytest.mark.full
def test_machines_that_lose_each_other_again_and_again_stop(in_tmp: Path) -> None:
    """All machines are there, and none knows a cause: such restarts count."""
    options = machines(1, 2, A)
    agent = agent_of(in_tmp, ENDS + LOSES, restarts=0, alone=options(), sizes=sizes())
    assert agent.run() == EXIT_LOST_PEER
    assert agent.failure is not None and agent.failure.lines[-1].startswith("error: a rank on another machine has not")


@pytest.mark.full
def test_a_failure_of_its_own_counts(in_tmp: Path) -> None:
    script = ENDS + 'leave(problems=["ValueError: no"], time=1.0)\nsys.exit(1)'
    agent = agent_of(in_tmp, script, restarts=0, alone=machines(1, 2, A)(), sizes=sizes())
    agent.run()
    assert agent.failure == Failure(1, ("error: ValueError: no",))


def test_a_machine_whose_device_computes_wrong_numbers_leaves_the_others(in_tmp: Path) -> None:
    """It restarts nothing, but does not end the job either."""
    options = machines(1, 2, A)
    script = (
        ENDS
        + """if rank == 1:
    leave(problems=["stopped: rank 1 computes wrong numbers"], status=76, time=1.0)
    sys.exit(76)
leave(problems=["stopped: rank 1 computes wrong numbers"], status=69, follows=True, time=0.5)
sys.exit(69)"""
    )
    agent = agent_of(in_tmp, script, restarts=3, alone=options(), sizes=sizes())
    peer = Peer(options(B), 2)
    joining = peer.join()
    assert agent.run() == EXIT_BAD_DEVICE
    joining.join()
    why = "not restarted, because a restart would compute on the same device"
    assert agent.failure == Failure(76, (f"stopped: rank 1 computes wrong numbers; {why}",))
    assert not peer.handler.is_closed()
    assert {node.addr for node in peer.handler.members} == {B}
    peer.close()


@pytest.mark.full
def test_an_impossible_size_waits_for_more_machines(in_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = machines(1, 2, A)
    found = sizes(parallelism__tensor_parallel_degree=2)
    agent = agent_of(in_tmp, ENDS, ranks=1, alone=options(), sizes=found)
    peer = Peer(options(B), 1)
    say, joining = agent.console.say, []

    def joins(line: str) -> None:
        say(line)
        if line.startswith("waiting for more machines, because 1 rank(s) cannot train: command line: parallelism.tensor"):
            joining.append(peer.join())

    agent.console.say = joins  # type: ignore[method-assign]
    agent.run()
    joining[0].join()
    assert agent.failure is None and (in_tmp / "started-2-0").exists() and not (in_tmp / "started-1-0").exists()


@pytest.mark.full
def test_an_impossible_size_stops_the_job(in_tmp: Path) -> None:
    found = sizes(parallelism__tensor_parallel_degree=2)
    agent = agent_of(in_tmp, ENDS, ranks=1, alone=machines(1, 2, A)(), sizes=found, when_impossible="stop")
    why = r"--nnodes 1:2: 1 machine\(s\) have joined, and 1 rank\(s\) cannot train: .*; start more machines, or use --elas"
    with pytest.raises(UserError, match=why):
        agent.run()


@pytest.mark.full
def test_the_wait_for_more_machines_ends(in_tmp: Path) -> None:
    found = sizes(parallelism__tensor_parallel_degree=2)
    agent = agent_of(in_tmp, ENDS, ranks=1, alone=machines(1, 2, A)(timeout=3), sizes=found)
    with pytest.raises(UserError, match=r"start more machines; none joined within 3 s \(--rdzv-timeout\)"):
        agent.run()


@pytest.mark.full
@pytest.mark.parametrize(("end", "failure"), ENDINGS, ids=["complete", "failed", "silent"])
def test_machines_that_make_the_size_impossible_idle(
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    end: tuple[int, str] | None,
    failure: Failure | None,
) -> None:
    """The last of three machines is not needed; it ends with the job, and like it."""
    options = machines(3, 4, C)  # the third of them
    found = sizes(parallelism__tensor_parallel_degree=2)
    agent = agent_of(in_tmp, ENDS, ranks=1, alone=options(), sizes=found)
    plan = choose(found, [1, 1, 1], 2, 0)
    first, second = Peer(options(A), 1, plan), Peer(options(B), 1)
    joining = [first.join(), second.join()]
    idle = agent.machines.idle

    def ends() -> None:
        joining[0].join()
        if end is None:
            first.close()
        else:
            first.end(*end)
        idle()

    monkeypatch.setattr(agent.machines, "idle", ends)
    assert agent.run() == (failure.status if failure is not None else 0)
    for thread in joining:
        thread.join()
    assert "titan: this machine idles: 2 of 3 machines train, because 3 rank(s) cannot train: " in capfd.readouterr().err
    assert not agent.machines.job_ends_here and not list(in_tmp.glob("started-*")) and agent.failure == failure


@pytest.mark.full
def test_a_store_that_outlives_jobs_serves_the_next_one() -> None:
    """Once a job has closed its rendezvous, and its machines report no more."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    quick = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2, "last_call_timeout": 1}
    options = Rendezvous(f"127.0.0.1:{store.port}", "job", (1, 2), 60, A, key=KEY, conf=quick)
    first = handler(options)
    first.next_rendezvous()
    first.put("end", "a record of the first job")
    first.shutdown()
    second = handler(options)
    assert len(second.next_rendezvous().members) == 1 and second.get("end") is None
    second.stop()


@pytest.mark.full
def test_a_job_that_has_closed_its_rendezvous_and_still_runs_keeps_it() -> None:
    """Its ranks may still be saving."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    quick = {"keep_alive_interval": 1, "keep_alive_max_attempt": 60, "last_call_timeout": 1}
    options = Rendezvous(f"127.0.0.1:{store.port}", "job", (1, 2), 60, A, key=KEY, conf=quick)
    peers = Peer(options, 1), Peer(replace(options, local_addr=B), 1)
    for thread in [peer.join() for peer in peers]:
        thread.join()
    peers[0].close()  # the other one still reports every second
    with pytest.raises(RendezvousClosed):
        handler(options).next_rendezvous()
    peers[1].leave()
