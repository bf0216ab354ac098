"""A short form of `python -m benchmarks.chaos`, and tests that it detects what it is there to detect."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import faults
from benchmarks.chaos.cluster import Cluster, processes_of, wait_until_gone
from benchmarks.chaos.report import Report, Struck, show
from benchmarks.chaos.session import Session, Trained
from benchmarks.chaos.site.titan_chaos import FOLDER, TRAIL
from benchmarks.chaos.trail import attempts_in, differences, lost_steps, trajectory
from benchmarks.chaos.watch import Watch
from titan_testing import PATIENCE

ROOT = Path(__file__).parents[2]
BATCH = 2
"""Sequences of the global batch in the records that these tests write."""


@pytest.mark.parametrize(
    ("steps", "kinds"),
    [
        pytest.param(12, ["kill-rank", "corrupt-newest"], marks=pytest.mark.full),
        pytest.param(24, ["kill-rank", "stop-rank", "full-disk", "corrupt-newest"], marks=pytest.mark.long),
    ],
)
def test_a_job_survives_faults_with_the_tokens_and_losses_of_an_undisturbed_one(
    tmp_path: Path, steps: int, kinds: list[str]
) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--ranks", "2", "--steps", str(steps)]
    command += ["--faults", str(len(kinds)), "--kinds", *kinds]
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*command, "--json"], cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["problems"] == [] and done.returncode == 0, done.stderr
    left_out = ["full-disk"] if found["notes"] else []  # where mounting is not permitted
    assert {fault["kind"] for fault in found["faults"]} == set(kinds) - set(left_out)
    assert found["compared_steps"] == steps and found["largest_difference"] <= 1e-6
    assert not list(tmp_path.glob("titan-chaos-*"))


def record(folder: Path, attempt: float, rank: int, begun: int, steps: dict[int, dict[int, str]]) -> None:
    """Write what a rank of an attempt trained on: by step, the digest of each row of the batch."""
    (folder / TRAIL).mkdir(exist_ok=True)
    lines = [{"begun": begun, "world": 2}]
    lines += [{"step": step, "time": attempt + step, "rows": rows} for step, rows in steps.items()]  # type: ignore[dict-item]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / TRAIL / f"{attempt:.6f}-{rank}.jsonl").write_text(text)


def steps_of(first: int, last: int, row: int, tokens: str = "") -> dict[int, dict[int, str]]:
    return {step: {row: f"{step}/{row}{tokens}"} for step in range(first, last + 1)}


def test_steps_that_a_resumed_attempt_trains_again_do_not_count(tmp_path: Path) -> None:
    record(tmp_path, 100.0, 0, 0, steps_of(1, 5, 0, tokens=" of the abandoned part"))
    record(tmp_path, 100.0, 1, 0, steps_of(1, 4, 1))  # killed in step 5
    record(tmp_path, 200.0, 0, 0, steps_of(1, 6, 0) | steps_of(1, 6, 0))
    record(tmp_path, 200.0, 1, 0, steps_of(1, 6, 1))
    record(tmp_path, 300.0, 1, 4, steps_of(5, 7, 1))
    record(tmp_path, 300.0, 0, 4, steps_of(5, 7, 0))
    attempts = attempts_in(tmp_path)
    final, problems = trajectory(attempts, BATCH)
    assert problems == [] and list(final) == list(range(1, 8))
    assert all(rows == {0: f"{step}/0", 1: f"{step}/1"} for step, rows in final.items())
    assert lost_steps(attempts, BATCH, 250.0) == 2 and lost_steps(attempts, BATCH, 0.0) == 4 + 2


@pytest.mark.parametrize(
    ("again", "begun", "problem"),
    [
        (steps_of(6, 8, 0), 5, "an attempt resumed after step 5, but only 4 were trained"),
        (steps_of(4, 5, 0) | steps_of(7, 8, 0), 3, r"an attempt that resumed after step 3 trained the steps \[4, 5, 7, 8\]"),
        (steps_of(4, 8, 1), 3, "step 4: two ranks trained on row 1 of the batch"),
    ],
    ids=["skipped", "with a gap", "doubled"],
)
def test_tokens_that_are_skipped_or_doubled_are_found(
    tmp_path: Path, again: dict[int, dict[int, str]], begun: int, problem: str
) -> None:
    for rank in range(2):
        record(tmp_path, 100.0, rank, 0, steps_of(1, 4, rank))
    record(tmp_path, 200.0, 0, begun, again)
    record(tmp_path, 200.0, 1, begun, {step: {1: f"{step}/1"} for step in again})
    _, problems = trajectory(attempts_in(tmp_path), BATCH)
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(problems)


def test_two_attempts_at_the_same_time_are_found(tmp_path: Path) -> None:
    for rank in range(2):
        record(tmp_path, 100.0, rank, 0, steps_of(1, 9, rank))
        record(tmp_path, 105.5, rank, 4, steps_of(5, 9, rank))
    _, problems = trajectory(attempts_in(tmp_path), BATCH)
    assert problems == ["step 6: an earlier attempt still trained when the next one had begun"]


def test_other_tokens_than_those_of_the_undisturbed_job_are_found() -> None:
    expected = {1: {0: "a", 1: "b"}, 2: {0: "c", 1: "d"}}
    assert differences(expected, expected) == []
    assert differences({1: {0: "a", 1: "b"}}, expected) == ["step 2 was not trained"]
    assert differences({1: {0: "b", 1: "b"}, 2: expected[2], 3: {}}, expected) == [
        "step 1 trained on other tokens in the rows [0] of the batch",
        "step 3 was trained, but does not belong to the job",
    ]


@pytest.mark.parametrize(
    ("step", "loss", "tokens", "problem"),
    [
        (2, 3.0 * (1 + 9e-7), 20, None),
        (2, 3.0 * (1 + 2e-6), 20, "losses differ by up to 2.0e-06 (relative); the most allowed is 1e-06"),
        (2, None, 20, "losses differ by up to inf (relative); the most allowed is 1e-06"),
        (2, 3.0, 21, "step 2: 21 tokens seen, expected 20"),
        (3, 3.0, 20, "the run log has the steps 1 to 3 (2 of them), expected 1 to 2 (2 of them)"),
    ],
)
def test_other_losses_than_those_of_the_undisturbed_job_are_found(
    tmp_path: Path, step: int, loss: float | None, tokens: int, problem: str | None
) -> None:
    first = {"step": 1, "loss": 4.0, "tokens_seen": 10}
    expected = Trained({}, {1: first, 2: {"step": 2, "loss": 3.0, "tokens_seen": 20}}, None)
    (tmp_path / "run").mkdir()
    lines = [first, {"step": step, "loss": loss, "tokens_seen": tokens}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    session = Session(tmp_path, 2, [], 1.0, Report(seed=0, steps=2, ranks=2))
    assert session.compare(expected) == ([] if problem is None else [problem])


def test_a_process_that_is_left_over_is_found(tmp_path: Path) -> None:
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, FOLDER: str(tmp_path)})
    try:
        while not Path(f"/proc/{left.pid}/cmdline").read_bytes().startswith(b"sleep"):
            pass  # the system is still setting up the process
        assert wait_until_gone(tmp_path, 0.0) == {left.pid: "sleep 600"}
    finally:
        left.kill()
        left.wait()
    assert processes_of(tmp_path) == {}


ENDING = """
import ctypes, sys, threading
threading.Thread(target=lambda: (print("up", flush=True), sys.stdin.read())).start()
ctypes.CDLL(None).syscall(ctypes.c_long(60), 0)  # this thread alone exits
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the system call is that of x86-64")
def test_a_process_whose_first_thread_has_ended_is_left_while_others_end(tmp_path: Path) -> None:
    """As one that is killed, for a moment: it keeps its locks."""
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process:
        assert process.stdout.readline() == b"up\n"
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][:1] != "Z":
            assert process.poll() is None
        assert wait_until_gone(tmp_path, 0.0, [process.pid]) == {process.pid: "killed"}
        process.stdin.close()
        assert wait_until_gone(tmp_path, PATIENCE, [process.pid]) == {}


def test_agents_are_started_again_unless_they_are_done_or_held_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tmp_path / "run", 2, [])
    first, second = cluster.agents
    for agent, status in ((first, 69), (second, 0)):
        agent.command = [sys.executable, "-c", f"raise SystemExit({status})"]
        cluster._start(agent)
        assert agent.process is not None
        agent.process.wait()
    first.command = ["sleep", "600"]
    cluster.supervise()
    assert second.done and second.process is None and not cluster.done
    assert first.process is not None and first.process.poll() is None
    first.held = True
    cluster.send(first, signal.SIGKILL)
    first.process.wait()
    cluster.supervise()
    assert first.process is None and sorted(cluster.exits) == [("agent 0", -9), ("agent 0", 69), ("agent 1", 0)]


def test_an_agent_that_ends_with_a_mistake_of_its_user_fails_the_run(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tmp_path / "run", 2, [])
    agent = cluster.agents[0]
    agent.command = [sys.executable, "-c", "print('titan: error: no'); raise SystemExit(2)"]
    cluster._start(agent)
    assert agent.process is not None
    agent.process.wait()
    with pytest.raises(faults.ChaosFailure, match="agent 0 ended with status 2: titan: error: no"):
        cluster.supervise()


def test_a_seed_means_the_same_faults() -> None:
    kinds = list(faults.KINDS)
    drawn = [faults.draw(kinds, 50, random.Random(seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {drawn[0].count(kind) for kind in kinds} == {5, 6}
    assert len(faults.draw(kinds, 3, random.Random(0))) == 3


@pytest.mark.parametrize("how", sorted(faults.DAMAGE))
def test_damage_changes_the_file(tmp_path: Path, how: str) -> None:
    file, chance = tmp_path / "file", random.Random(0)
    for _ in range(20):
        file.write_bytes(b"0123456789")
        faults.DAMAGE[how](file, chance)
        assert file.read_bytes() != b"0123456789"


def test_a_full_disk_has_no_room_for_a_byte(tmp_path: Path) -> None:
    fill = f"""
from pathlib import Path
from benchmarks.chaos.disk import Ballast, mount
folder = Path({str(tmp_path / "disk")!r})
print(mount(folder), flush=True)
ballast = Ballast(folder)
ballast.fill()
try:
    (folder / "more").write_bytes(b"x")
except OSError as error:
    print(error.strerror)
ballast.free()
(folder / "more").write_bytes(b"x")
"""
    # In a process of its own: a mount namespace cannot be left.
    done = subprocess.run([sys.executable, "-c", fill], cwd=ROOT, capture_output=True, text=True, check=False)
    why, _, rest = done.stdout.partition("\n")
    if why:
        # Without a file system of its own, the test would fill the machine's disk.
        pytest.skip(f"no file system can be filled here: {why}")
    assert rest == "No space left on device\n" and done.returncode == 0, done.stderr
    assert not any((tmp_path / "disk").iterdir()), "the mount is visible outside of the process"


def test_the_report_names_what_differs() -> None:
    report = Report(seed=0, steps=4, ranks=2, faults=[Struck("kill-rank", "step", 2, lost=1, first_step=8.0, whole=9.0)])
    assert "passed: the tokens of all 4 steps" in show(report)
    report.problems.append("step 2 was not trained")
    assert "FAILED: step 2 was not trained" in show(report) and "passed" not in show(report)
    assert report.as_dict()["passed"] is False


def test_the_current_attempt_is_followed(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.poll()
    assert watch.step == 0 and watch.ranks() == []
    events = [{"event": "start", "time": 10.0, "step": 0, "world_size": 2, "processes": [{"pid": 7}, {"pid": 8}]}]
    (tmp_path / "events.jsonl").write_text(json.dumps(events[0]) + "\n")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "time": 11.0}\n{"step": 2, "time": 12.0}\n')
    watch.poll()
    assert watch.step == 2 and watch.ranks() == [7, 8] and watch.resumed(9.0, 2) and not watch.resumed(9.0, 4)
    restart = {**events[0], "time": 20.0, "step": 1}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(restart) + "\n")
    metrics.write_text('{"step": 1, "time": 11.0}\n')  # as a resumed run leaves it
    watch.poll()
    assert watch.step == 0 and not watch.resumed(9.0)
    with metrics.open("a") as file:
        file.write('{"step": 2, "time": 21.0}\n')
    watch.poll()
    assert watch.step == 2 and watch.resumed(9.0) == restart
