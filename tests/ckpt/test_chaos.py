"""A run that is killed at any instant of a save resumes from a complete checkpoint, with the losses of an uninterrupted run.

The full suite kills three times. The long test kills one rank or all ranks over fifty times, in a seeded loop:
``uv run pytest -m long tests/ckpt/test_chaos.py``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from harness.distributions import write_distribution
from titan_testing import PATIENCE

PHASES = ("staging", "writing", "before commit", "while committing", "after commit", "pruning")
STEPS = 24

PLUGIN = '''
"""Kills its process in a phase of a save. CHAOS = "phase|number of the save|ranks"."""
import os, signal
from titan_core.api import hookimpl

api = (1, 0)


@hookimpl
def titan_job_assembled(job):
    wanted, number, ranks = os.environ.get("CHAOS", "none|0|").split("|")
    if os.environ["RANK"] in ranks.split(","):
        watch(wanted, int(number))


def watch(wanted, number):
    from titan_ckpt.format import folder, manifest, writer
    from titan_ckpt.save import saving

    saves = 0

    def kill(phase):
        if phase == wanted and saves >= number:
            os.kill(os.getpid(), signal.SIGKILL)

    original_save = saving.Saving.save

    def save(self, last):
        nonlocal saves
        saves += 1
        kill("staging")
        return original_save(self, last)

    original_bytes = writer.bytes_of
    written = 0

    def to_bytes(data):
        nonlocal written
        written += 1
        if written % 7 == 0:
            kill("writing")
        return original_bytes(data)

    original_write = folder.Folder.write

    def write(self, name, data):
        if name == manifest.NAME:
            kill("before commit")
            if wanted == "while committing" and saves >= number:
                with self.create(name + ".new") as file:
                    file.write(data[: len(data) // 2])
                kill("while committing")
        original_write(self, name, data)
        if name == manifest.NAME:
            kill("after commit")

    original_remove = folder.Folder.remove

    def remove(self, *names):
        original_remove(self, *names)
        if manifest.NAME in names and self.list():
            kill("pruning")

    saving.Saving.save = save
    writer.bytes_of = to_bytes
    folder.Folder.write = write
    folder.Folder.remove = remove
'''

TINY = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}",
    "training.seq_len": "16",
    "training.local_batch_size": "2",
    "training.global_batch_size": "4",
    "training.steps": str(STEPS),
    "training.deterministic": "true",
    "checkpoint.enable": "true",
    "checkpoint.interval": "2",
    "checkpoint.keep_latest_k": "2",
    "metrics.log_freq": "1",
    "job.device": "cpu",
}


class Run:
    """A job of two ranks that is started repeatedly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.site = write_distribution(folder / "site", "chaos", PLUGIN)

    def start(self, name: str, mode: str = "disabled", chaos: str = "none|0|") -> list[int]:
        """Run until the end or a kill. Returns the ranks' exit statuses."""
        # The store listens on a port chosen by the system: a free port found beforehand may be taken before it is used.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = str(store.port)
        flags = [part for key, value in TINY.items() for part in (f"--{key}", value)]
        command = [sys.executable, "-m", "titan_core", "train", "tiny", *flags, "--job.dump_folder", name]
        command += ["--checkpoint.async_mode", mode]
        path = os.pathsep.join(filter(None, (str(self.site), os.environ.get("PYTHONPATH"))))
        ranks = []
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            environment = {**os.environ, **place, "MASTER_PORT": port, "CHAOS": chaos, "PYTHONPATH": path}
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            ranks.append(subprocess.Popen(command, cwd=self.folder, env=environment, stdout=-3, stderr=subprocess.PIPE))
        # When one rank dies, kill the others, as a launcher does.
        while all(rank.poll() is None for rank in ranks):
            try:
                ranks[0].wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        statuses = []
        for rank in ranks:
            try:
                rank.wait(PATIENCE if all(one.poll() in (None, 0) for one in ranks) else 0.5)
            except subprocess.TimeoutExpired:
                rank.kill()
            _, self.errors = rank.communicate()
            statuses.append(rank.returncode)
        return statuses

    def losses(self, name: str) -> list[float]:
        """Return the loss of every step from the run's metrics."""
        records = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        return [record["loss"] for record in records]


def kill_often(run: Run, kills: list[tuple[str, str, int, str]]) -> None:
    """Start a run, kill it as ``kills`` lists (mode, phase, number of the save, ranks), and compare its final losses."""
    assert run.start("whole") == [0, 0], run.errors.decode()
    exact = run.losses("whole")
    number, newest = 0, 0
    for mode, phase, save, ranks in kills:
        name = f"killed-{number}"
        statuses = run.start(name, mode, f"{phase}|{save}|{ranks}")
        if statuses == [0, 0]:  # the run ended before the kill
            assert run.losses(name) == exact
            number, newest = number + 1, 0
            continue
        assert -signal.SIGKILL in statuses, run.errors.decode()
        complete = [
            int(path.parent.name.removeprefix("step-")) for path in (run.folder / name).glob("checkpoint/*/checkpoint.json")
        ]
        assert max(complete, default=0) >= newest, "a complete checkpoint was lost"
        newest = max(complete, default=0)
    name = f"killed-{number}"
    assert run.start(name) == [0, 0], run.errors.decode()
    assert run.losses(name) == exact


KILLS = [("async", "writing", 2, "1"), ("disabled", "while committing", 2, "0,1"), ("disabled", "pruning", 2, "0")]


@pytest.mark.full
def test_kills_in_a_save(tmp_path: Path) -> None:
    kill_often(Run(tmp_path / "run"), KILLS)


@pytest.mark.long
def test_fifty_kills(tmp_path: Path) -> None:
    chance = random.Random(4)
    kills = []
    for phase in PHASES * 9:
        # Only the first rank commits and removes.
        ranks = chance.choice(["0", "1", "0,1"] if phase in ("staging", "writing") else ["0"])
        kills.append((chance.choice(["disabled", "async"]), phase, chance.randint(1, 4), ranks))
    kill_often(Run(tmp_path / "run"), kills)
