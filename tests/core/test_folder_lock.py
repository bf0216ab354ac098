"""A folder has a single writer, on one machine and between machines."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.runlog.run_directory import early_lock, run_lock
from titan_core.toolkit import folder_lock
from titan_core.toolkit.folder_lock import FolderLock, Holder
from titan_core.toolkit.launching import OUTCOMES, lock_for_ranks
from titan_testing import PATIENCE


def lock(folder: Path) -> FolderLock:
    return FolderLock(folder, "job.dump_folder = 'x'")


def test_a_second_writer_is_refused_with_host_and_process_and_release_removes_the_file(tmp_path: Path) -> None:
    with lock(tmp_path / "run"), pytest.raises(UserError) as caught, lock(tmp_path / "run"):
        pass
    host, pid = os.uname().nodename, os.getpid()
    assert str(caught.value).startswith(f"job.dump_folder = 'x': process {pid} on host {host} (since 20")
    with lock(tmp_path / "run"):
        assert [file.name for file in (tmp_path / "run").iterdir()] == [".lock"]
    assert not list((tmp_path / "run").iterdir())


HOLD = """
import sys
from pathlib import Path
from titan_core.toolkit.folder_lock import FolderLock
with FolderLock(Path(sys.argv[1]), "x"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on host"), lock(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with lock(tmp_path):
            pass


def left_by(holder: Holder, folder: Path, seconds_ago: float) -> Path:
    file = folder / ".lock"
    file.write_text(json.dumps(asdict(holder)))
    now = file.stat().st_mtime
    os.utime(file, (now - seconds_ago, now - seconds_ago))
    return file


ELSEWHERE = replace(Holder.this_process(), machine="another machine", host="node7", pid=4711)


def test_a_stale_lock_of_another_machine_is_taken_over(tmp_path: Path) -> None:
    left_by(ELSEWHERE, tmp_path, seconds_ago=folder_lock.STALE_SECONDS + 5)
    with lock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_that_another_machine_still_touches_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = left_by(ELSEWHERE, tmp_path, seconds_ago=1)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.01)
    looked = threading.Event()
    now = FolderLock._now
    monkeypatch.setattr(FolderLock, "_now", lambda self: (looked.set(), now(self))[1])

    def beat() -> None:
        looked.wait()
        os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(UserError, match="process 4711 on host node7"), lock(tmp_path):
        pass
    thread.join()
    assert json.loads(file.read_text())["pid"] == 4711


def test_a_lock_that_another_machine_stops_touching_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by(ELSEWHERE, tmp_path, seconds_ago=0.1)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(folder_lock, "STALE_SECONDS", 0.2)
    with lock(tmp_path):
        pass


@pytest.mark.parametrize(("seconds_ago", "restarted"), [(20, False), (1, True)], ids=["silent", "lost a moment ago"])
def test_the_lock_of_a_lost_machine_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds_ago: float, restarted: bool
) -> None:
    """As a server of NFS keeps it, until the machine's lease ends."""
    file = left_by(ELSEWHERE, tmp_path, seconds_ago)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(folder_lock, "STALE_SECONDS", 0.2)
    kept = os.open(file, os.O_RDWR)
    fcntl.flock(kept, fcntl.LOCK_EX)
    monkeypatch.setattr(folder_lock.log, "warning", lambda *given: threading.Timer(0.1, os.close, [kept]).start())
    with FolderLock(tmp_path, "job.dump_folder = 'x'", restarted):
        assert json.loads(file.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(("seconds_ago", "restarted"), [(1, False), (20, True)], ids=["at once", "once it is touched"])
def test_the_lock_of_a_machine_that_lives_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_ago: float, restarted: bool
) -> None:
    file = left_by(ELSEWHERE, tmp_path, seconds_ago)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.01)
    waits: list[object] = []
    monkeypatch.setattr(
        folder_lock.log, "warning", lambda *given: (waits.append(given), threading.Timer(0.1, os.utime, [file]).start())
    )
    kept = os.open(file, os.O_RDWR)
    fcntl.flock(kept, fcntl.LOCK_EX)
    with (
        pytest.raises(UserError, match="process 4711 on host node7"),
        FolderLock(tmp_path, "job.dump_folder = 'x'", restarted),
    ):
        pass
    os.close(kept)
    assert len(waits) == restarted


@pytest.mark.parametrize("alive", [True, False])
def test_without_flock_the_holder_on_this_machine_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    monkeypatch.setattr(folder_lock, "_flock", lambda descriptor: None)
    monkeypatch.setattr(folder_lock, "is_alive", lambda pid: alive)
    monkeypatch.setattr(folder_lock, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.01)
    waited = []
    require_gone = FolderLock._now
    monkeypatch.setattr(FolderLock, "_now", lambda self: (waited.append(1), require_gone(self))[1])
    left_by(Holder.this_process(), tmp_path, seconds_ago=0.1)
    with lock(tmp_path):
        assert bool(waited) is alive


def test_the_heartbeat_touches_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.01)
    beaten = threading.Event()
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda path: (utime(path), beaten.set()))
    with lock(tmp_path):
        before = (tmp_path / ".lock").stat().st_mtime_ns
        beaten.clear()
        assert beaten.wait(PATIENCE)
        assert (tmp_path / ".lock").stat().st_mtime_ns >= before


def test_a_damaged_lock_file_without_a_holder_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"pid": 4')
    with lock(tmp_path):
        pass


def test_a_second_job_is_refused_before_torch_is_imported(in_tmp: Path) -> None:
    (in_tmp / "run").mkdir()
    program = (
        "import sys\nfrom titan_core.__main__ import main\n"
        "sys.argv = ['titan', 'train', 'tiny', '--job.dump_folder', 'run']\n"
        "print(main(), 'torch' in sys.modules)"
    )
    with lock(in_tmp / "run"):
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "2 False\n"
    (error,) = (line for line in result.stderr.splitlines() if not line.endswith(" ..."))  # a slow phase has a line too
    assert "job.dump_folder = 'run': process" in error


@pytest.mark.full
def test_the_launcher_learns_why_a_rank_cannot_lock_the_directory(in_tmp: Path) -> None:
    (in_tmp / "run").mkdir()
    (in_tmp / "outcomes").mkdir()
    of_rank = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", OUTCOMES: "outcomes"}
    command = [sys.executable, "-m", "titan_core", "train", "tiny", "--job.dump_folder", "run"]
    with lock(in_tmp / "run"):
        assert subprocess.run(command, env=of_rank, capture_output=True, check=False).returncode == 2
    outcome = json.loads((in_tmp / "outcomes/rank-0.json").read_text())
    assert outcome["problems"][0].startswith("job.dump_folder = 'run': process ") and outcome["status"] == 2


def test_the_run_keeps_the_lock_taken_before_torch(in_tmp: Path) -> None:
    with early_lock("run"):
        assert not Path("run").exists()  # a mistake in the data leaves no files behind
    Path("run").mkdir()
    with early_lock("run"), pytest.raises(UserError), lock(in_tmp / "run"):
        pass
    with early_lock("run"), early_lock("run"), run_lock("run"):
        pass
    with lock(in_tmp / "run"):
        pass


def test_ranks_leave_the_lock_to_their_launcher_and_rank_0(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock_for_ranks("run"), run_lock("run"), pytest.raises(UserError), lock(in_tmp / "run"):
        pass
    monkeypatch.setenv("RANK", "1")
    with run_lock("run"), lock(in_tmp / "run"):
        pass
    monkeypatch.setenv("RANK", "0")
    with run_lock("run"), pytest.raises(UserError), lock(in_tmp / "run"):
        pass
