"""The harness itself: what a test leaves behind is found or undone, and a crash of a pool's process is a failure."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from harness import leftovers
from harness.leftovers import Leftovers, settings_undone
from titan_testing import PATIENCE, gloo_pool
from titan_testing.gloo_pool import GlooPool


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE", 0.1)


def test_a_thread_that_does_not_end_is_found() -> None:
    before, over = Leftovers(), threading.Event()
    thread = threading.Thread(target=over.wait, name="stays")
    thread.start()
    assert before.found() == ["thread 'stays'"]
    over.set()
    thread.join()
    assert before.found() == []


def test_a_process_that_does_not_end_is_found_and_killed() -> None:
    before = Leftovers()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (found,) = before.found()
    assert found.startswith(f"process {child.pid}: ")
    assert found.endswith("-c input()")
    assert child.wait(PATIENCE) == -signal.SIGKILL
    cast(Any, child.stdin).close()
    assert before.found() == []


def test_so_is_a_process_whose_parent_has_ended() -> None:
    before = Leftovers()
    read, write = os.pipe()
    orphan = "import os, time; os.write({write}, str(os.getpid()).encode()); os.close({write}); time.sleep(1e6)"
    command = f"[sys.executable, '-c', {orphan.format(write=write)!r}]"
    start = f"import subprocess, sys; subprocess.Popen({command}, pass_fds=[{write}])"
    subprocess.run([sys.executable, "-c", start], pass_fds=[write], check=True)
    os.close(write)
    pid = int(os.read(read, 100))
    os.close(read)
    (found,) = before.found()
    assert found.startswith(f"process {pid}: ")


def test_settings_are_undone() -> None:
    logger = logging.getLogger("titan_core")
    before = (logger.level, torch.get_num_threads(), os.umask(0o022), list(sys.path), signal.getsignal(signal.SIGUSR1))
    os.umask(before[2])
    with settings_undone():
        os.environ["OF_A_TEST"] = "1"
        del os.environ["HF_HUB_OFFLINE"]
        logger.setLevel(logging.CRITICAL)
        logging.disable(logging.ERROR)
        torch.set_num_threads(before[1] + 1)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        os.umask(0o011)
        sys.path.append("nowhere")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        gc.freeze()
        gc.disable()
    assert "OF_A_TEST" not in os.environ
    assert "HF_HUB_OFFLINE" in os.environ
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert logging.root.manager.disable == 0
    after = (logger.level, torch.get_num_threads(), os.umask(before[2]), list(sys.path), signal.getsignal(signal.SIGUSR1))
    assert after == before


@pytest.fixture
def pool() -> Iterator[GlooPool]:
    with closing(GlooPool(stacks=True)) as pool:
        yield pool


def crash() -> None:
    os._exit(3)


def test_a_crash_of_a_pools_process_fails_its_test(pool: GlooPool) -> None:
    with pytest.raises(RuntimeError, match=r"the process of rank 0 has died \(exit code 3\)"):
        pool.run(1, crash)
    assert pool.run(1, os.getpid) != [os.getpid()]  # later tests have new processes


def test_ranks_that_do_not_answer_show_where_they_are(pool: GlooPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run(2, os.getpid)
    monkeypatch.setattr(gloo_pool, "PATIENCE", 0.5)
    waiting = r"did not answer in time\nrank\(s\) \[0, 1\]: _answer \(gloo_pool.py:\d+\) < _serve"
    with pytest.raises(RuntimeError, match=waiting):
        pool.run(2, signal.pause)


def leave(name: str) -> int:
    os.environ[name] = "left"
    os.environ.pop("LOCAL_RANK")
    return os.getpid()


def test_a_call_leaves_nothing_in_the_environment_of_a_pools_process(pool: GlooPool) -> None:
    """Its next group may have ranks that took no part in this call."""
    process = pool.run(1, leave, "A_VARIABLE")
    assert pool.run(1, os.getpid) == process
    assert pool.run(1, os.getenv, "A_VARIABLE") == [None]
    assert pool.run(1, os.getenv, "LOCAL_RANK") == ["0"]


def path_and_leave(folder: str) -> list[str]:
    """Return where this process looks for modules, and leave it with one folder more."""
    before = list(sys.path)
    sys.path.insert(0, folder)
    return before


def test_a_pools_process_has_the_import_path_of_its_caller(
    pool: GlooPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not that of the test in which it was started: what only that test installs is no plugin of the next one."""
    with monkeypatch.context() as context:
        context.syspath_prepend(str(tmp_path))
        assert str(tmp_path) in pool.run(1, path_and_leave, str(tmp_path / "left"))[0]
    assert pool.run(1, path_and_leave, "nowhere") == [sys.path]
