"""Only the thread that trains divides operators over several CPU threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_testing import PATIENCE

SCRIPT = """
import json, os, sys, threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from titan_testing.jobs import make_job
from titan_core.loop.world import join_world

LARGE = torch.ones(1 << 20)

def threads():
    return set(os.listdir("/proc/self/task"))

def started(call):  # threads that exist while and after another thread of any kind calls operators
    before = threads()
    during = call()
    return len((during or threads()) - before)

def copy():
    LARGE.clone()
    return threads() - {str(threading.get_native_id())}

def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(copy()))
    thread.start()
    thread.join()
    return found[0]

def in_a_pool():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy).result()

def in_gloo():  # as a checkpoint does: gloo's thread copies what the ranks exchange, and stays
    for _ in range(4):  # whichever of its threads
        dist.gather_object(b"a" * 10**6, [None])

found = {}
with join_world(make_job("tiny", {"job.device": "cpu"})):
    LARGE.clone()  # the team of the thread that trains
    found["threads"] = torch.get_num_threads()
    for kind in (in_a_thread, in_a_pool, in_gloo):
        found[kind.__name__] = started(kind)
    found["team"] = torch.get_num_threads()
with ThreadPoolExecutor(1) as pool:
    found["afterwards"] = [torch.get_num_threads(), pool.submit(torch.get_num_threads).result()]
print(json.dumps(found))
"""


# macOS lists the threads of a process nowhere that a test can read; what it would count is OpenMP's there too.
@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads that Linux lists in /proc")
def test_no_other_thread_brings_up_a_team(in_tmp: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }  # spinning costs time on a busy machine
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "threads": 2,
        "in_a_thread": 0,
        "in_a_pool": 0,
        "in_gloo": 0,
        "team": 2,
        "afterwards": [2, 2],
    }
