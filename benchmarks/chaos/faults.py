"""The faults that the job has to survive. Each waits for what it is about, never for a time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.cluster import ChaosFailure, Cluster
from benchmarks.chaos.disk import Ballast
from benchmarks.chaos.watch import Watch

MANIFEST = "checkpoint.json"


@dataclass(frozen=True)
class Scene:
    """What a fault acts on."""

    cluster: Cluster
    watch: Watch
    checkpoints: Path
    ranks: int
    """Number of ranks of the whole job."""
    wait: Callable[[str, Callable[[], object]], None]
    """Waits for a condition, described in words; raises :class:`ChaosFailure` if it takes too long."""
    chance: random.Random

    def rank(self) -> int:
        """Return a random rank."""
        return self.chance.randrange(len(self.watch.ranks()))

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        with suppress(ProcessLookupError):  # an earlier signal of this fault may have ended the job already
            os.kill(self.watch.ranks()[rank], number)

    def whole(self, since: float) -> None:
        """Wait until all ranks train again."""
        self.wait(f"a step on {self.ranks} ranks", lambda: self.watch.resumed(since, self.ranks))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all ranks within the block, so that none writes, and kill one of them at its end."""
        for rank in range(self.ranks):
            self.signal(rank, signal.SIGSTOP)
        yield
        self.signal(self.rank(), signal.SIGKILL)
        for rank in range(self.ranks):
            self.signal(rank, signal.SIGCONT)

    def failed_saves(self, since: float) -> list[str]:
        """Return what the run log says about saves that failed after a time (seconds since the epoch)."""
        return [finding["message"] for finding in self.watch.of("finding", since) if finding["kind"] == "checkpoint"]

    def newest(self) -> Path:
        """Return the newest complete checkpoint."""
        complete = [path.parent for path in self.checkpoints.glob(f"step-*/{MANIFEST}")]
        return max(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by the name of its folder; -1 if it has been moved aside."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def kill_rank(scene: Scene) -> str:
    """SIGKILL of a rank"""
    since, rank = time.time(), scene.rank()
    scene.signal(rank, signal.SIGKILL)
    scene.whole(since)
    return f"rank {rank}"


def stop_rank(scene: Scene) -> str:
    """SIGSTOP of a rank, which then hangs for ever"""
    since, rank = time.time(), scene.rank()
    scene.signal(rank, signal.SIGSTOP)
    scene.whole(since)
    return f"rank {rank}"


def term_rank(scene: Scene) -> str:
    """SIGTERM of a rank: preemption"""
    since, rank = time.time(), scene.rank()
    scene.signal(rank, signal.SIGTERM)
    scene.whole(since)
    return f"rank {rank}"


def term_agent(scene: Scene) -> str:
    """SIGTERM of an agent: preemption of a machine"""
    since, agent = time.time(), scene.chance.choice(scene.cluster.agents)
    scene.cluster.send(agent, signal.SIGTERM)
    scene.whole(since)
    return agent.name


def kill_agent(scene: Scene) -> str:
    """SIGKILL of an agent, which comes back once the other one trains alone"""
    host = scene.cluster.host()
    since, agent = time.time(), next(agent for agent in scene.cluster.agents if agent is not host)
    agent.held = True
    scene.cluster.send(agent, signal.SIGKILL)
    alone = scene.ranks // 2
    scene.wait(f"a step on {alone} ranks", lambda: scene.watch.resumed(since, alone))
    scene.cluster.bring_back(agent)
    scene.whole(since)
    return f"{agent.name}; {scene.ranks} -> {alone} -> {scene.ranks} ranks"


def kill_launcher(scene: Scene) -> str:
    """SIGKILL of the agent that hosts the rendezvous"""
    since, host = time.time(), scene.cluster.host()
    scene.cluster.send(host, signal.SIGKILL)
    scene.whole(since)
    return f"{host.name}, the host of the rendezvous"


def full_disk(scene: Scene) -> str:
    """a full disk under the checkpoints; a rank is killed while it is full"""
    since, ballast = time.time(), Ballast(scene.checkpoints.parent)
    try:
        ballast.fill()
        scene.wait("a save that failed", lambda: scene.failed_saves(since))
        killed = time.time()
        scene.signal(scene.rank(), signal.SIGKILL)
        scene.whole(killed)
    finally:
        ballast.free()
    freed = time.time()
    scene.wait("a checkpoint", lambda: scene.watch.of("checkpoint", freed))
    return scene.failed_saves(since)[0].partition(";")[0]


def delete_newest(scene: Scene) -> str:
    """the newest checkpoint is deleted, and a rank is killed"""
    since = time.time()
    with scene.frozen():
        newest = scene.newest()
        shutil.rmtree(newest)
    scene.whole(since)
    _require_older(scene, since, newest)
    return newest.name


def corrupt_newest(scene: Scene) -> str:
    """the newest checkpoint is damaged, and a rank is killed"""
    since, how = time.time(), scene.chance.choice(sorted(DAMAGE))
    with scene.frozen():
        newest = scene.newest()
        data = scene.chance.choice(sorted(newest.glob("data-*.bin")))
        DAMAGE[how](newest / MANIFEST if "manifest" in how else data, scene.chance)
    scene.whole(since)
    _require_older(scene, since, newest)
    return f"{newest.name}, {how}"


def _require_older(scene: Scene, since: float, damaged: Path) -> None:
    first = next(start for start in scene.watch.of("start", since))
    if first["step"] >= step_of(damaged):
        raise ChaosFailure(f"the job resumed after step {first['step']}, although {damaged.name} was destroyed")


def _flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _cut(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "a flipped bit of the data": _flip,
    "a flipped bit of the manifest": _flip,
    "truncated data": _cut,
    "a truncated manifest": _cut,
}

KINDS: dict[str, Callable[[Scene], str]] = {
    "kill-rank": kill_rank,
    "stop-rank": stop_rank,
    "term-rank": term_rank,
    "term-agent": term_agent,
    "kill-agent": kill_agent,
    "kill-launcher": kill_launcher,
    "full-disk": full_disk,
    "delete-newest": delete_newest,
    "corrupt-newest": corrupt_newest,
}
"""What each kind of fault does. It returns what it did, once the job has recovered."""


def draw(kinds: list[str], number: int, chance: random.Random) -> list[str]:
    """Return ``number`` kinds in random order, each as often as any other, or once more."""
    drawn = (kinds * (number // len(kinds) + 1))[: number - number % len(kinds)] + chance.sample(kinds, number % len(kinds))
    chance.shuffle(drawn)
    return drawn
