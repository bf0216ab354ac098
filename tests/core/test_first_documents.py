"""Before the first step, a source is refused by name if ranks read different documents from it, or if it does not continue
where it was saved; correct sources are read as without the check."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import letters
from harness.planted_sources import AtZero, FromTheBeginning, Frozen, InsideADocument, OneLost, OneTwice, Records, Source
from titan_core.api import CorruptRecord, ExcludedRecord, MeshPlan, UserError, hookimpl
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.data.first_documents import check_first_documents
from titan_core.loop.world import join_world
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job, run_job

FILES = [[f"{name} {number}" for number in range(20)] for name in ("apple", "birch")]


class Unsettled(Source):
    """Its documents depend on what ``salt`` returns."""

    def __init__(self, salt: Callable[[], object]) -> None:
        super().__init__(FILES)
        self.salt = salt

    def shard(self, index: int, count: int, epoch: int) -> Records:
        return Records([f"{record} {self.salt()}" for record in super().shard(index, count, epoch).records])


class Shared(Source):
    """All its shards are one."""

    one: Records | None = None

    def shard(self, index: int, count: int, epoch: int) -> Records:
        self.one = self.one or super().shard(index, count, epoch)
        return self.one


class Fewer(Source):
    """Has as many documents as its files say on this rank."""

    @property
    def num_documents(self) -> int:  # type: ignore[override]
        return 40 - int(os.environ["RANK"])


class NotPlain(Records):
    def state_dict(self) -> Any:
        return {"next": self.next, "seen": {1}}

    def load_state_dict(self, state: Any) -> None:
        self.next = state["next"]


class Reset(Records):
    def __next__(self) -> Any:
        raise ConnectionResetError("by peer")


BETWEEN_RANKS = "rank 1 reads another first document of logical shard 0 of 8 than rank 0; .*not from RANK, a process id"
SOURCES: dict[str, tuple[Callable[[], Source], str]] = {
    "a process id": (lambda: Unsettled(os.getpid), BETWEEN_RANKS),
    "the rank": (lambda: Unsettled(lambda: os.environ["RANK"]), BETWEEN_RANKS),
    "a shift by the rank": (lambda: Source(FILES, shift=int(os.environ["RANK"])), BETWEEN_RANKS),
    "other files": (lambda: Source([*FILES[int(os.environ["RANK"]) :], *FILES]), BETWEEN_RANKS),
    "another number of documents": (lambda: Fewer(FILES), "rank 1 reads 39 documents, and not 40 as rank 0"),
    "the time": (lambda: Unsettled(time.time_ns), "read twice by one process, has other documents then"),
    "its own random numbers": (lambda: Unsettled(random.SystemRandom().random), "read twice by one process"),
    "one shard for all": (lambda: Shared(FILES), "shard returned the same object twice"),
    "a position that stays": (lambda: Source(FILES, FromTheBeginning), "continues elsewhere .*'next': 1}"),
    "a lost record": (lambda: Source(FILES, OneLost), "continues elsewhere"),
    "a record twice": (lambda: Source(FILES, OneTwice), "continues elsewhere"),
    "inside a document": (lambda: Source(FILES, InsideADocument), "continues elsewhere"),
    "a set in its position": (lambda: Source(FILES, NotPlain), "which JSON cannot hold: .*set is not JSON serializable"),
}
RIGHT: dict[str, Callable[[], Source]] = {
    "plain": lambda: Source(FILES),
    "bad records": lambda: Source([[CorruptRecord("here", "bad"), "a"], [ExcludedRecord("here", "long"), "b"], *FILES]),
    "empty shards": lambda: Source([["a", "b", "c"]]),
    "one record each": lambda: Source([[*"abcdefgh"]]),
    # Found where the position is used again: these shards are right as long as they are read once.
    "frozen after a restore": lambda: Source(FILES, Frozen),
    "at zero after a restore": lambda: Source(FILES, AtZero),
    "a network that fails": lambda: Source(FILES, Reset),
}


def checked(folder: str, name: str, dim: str) -> str:
    """Check a source on the ranks of a mesh with the dimension ``dim``; return the error."""
    os.chdir(folder)
    job = make_job("tiny", {"job.device": "cpu"})
    size = int(os.environ["WORLD_SIZE"])
    degrees = {one.name: size if one.name == dim else 1 for one in STANDARD_DIMS}
    ranks = size if dim == "dp_shard" else 1
    spec = replace(job.data, plan=replace(job.data.plan, ranks=ranks, logical_shards=8))
    make = SOURCES[name][0] if name in SOURCES else RIGHT[name]
    with join_world(replace(job, mesh=MeshPlan(STANDARD_DIMS, degrees))) as world:
        try:
            check_first_documents(spec, [make()], world)
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("dim", ["dp_shard", "pp"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_ranks_cannot_share_is_refused_by_name(gloo: GlooPool, tmp_path: Path, name: str, dim: str) -> None:
    first, second = gloo.run(2, checked, str(tmp_path), name, dim)
    assert first == second, "all ranks raise the same error"
    assert first.startswith("plugin 'core' (titan-core ") and "): dataset 'stdlib': " in first
    assert re.search(SOURCES[name][1], first), first


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_source_passes(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    assert gloo.run(2, checked, str(tmp_path), name, "dp_shard") == ["", ""]


def trained(folder: str, salted: bool, tried: bool = True) -> list[Any]:
    """Train two steps on documents with the rank in them, or without; return the steps, and the losses or the error."""
    os.chdir(folder)
    seen: list[Any] = []

    class Steps:
        @hookimpl
        def titan_step_start(self, step: int) -> None:
            seen.append(step)

    text = letters.Letters.text
    with pytest.MonkeyPatch.context() as patch:
        if salted:
            patch.setattr(letters.Letters, "text", lambda self, index: text(self, index) + os.environ["RANK"])
        if not tried:
            patch.setattr("titan_core.loop.trainer.check_first_documents", lambda *_: None)
        data = {"training.dataset": "letters", "training.dataset_path": ",".join(["40"] * 64), "training.steps": 2}
        try:
            seen += run_job(make_job("tiny", {"job.device": "cpu", **data}), observers=[Steps()]).losses
        except UserError as error:
            seen.append(str(error))
    return seen


def test_documents_that_differ_end_a_job_before_its_first_step(gloo: GlooPool, tmp_path: Path) -> None:
    for (error,) in gloo.run(2, trained, str(tmp_path), True):
        assert error.startswith("plugin 'harness' (titan-harness 1.0): dataset 'letters': rank 1 reads another ")


def test_the_check_leaves_the_stream_as_it_is(gloo: GlooPool, tmp_path: Path) -> None:
    with_check, without = (gloo.run(2, trained, str(tmp_path), False, tried) for tried in (True, False))
    assert with_check == without
    assert with_check[0][:2] == [1, 2] and len(with_check[0]) == 4
