"""The ranks of a job: coordinates, collectives, and the check that all run the same job."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from email.message import Message
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch
from urllib.error import HTTPError

import pytest
import torch
import torch.distributed

from harness.one_of_many import OneOfMany
from titan_core.__main__ import main
from titan_core.api import MeshDim, MeshPlan, UserError, World
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.api.parallel.tree import gather_objects, gather_on_first, portable
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.loop.world import join_world, require_same_job, store_of_job
from titan_core.toolkit.errors import caused_by_peer
from titan_core.toolkit.open_files import allow_open_files
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, make_job, run_recipe


def test_coordinates_of_ranks_that_see_the_same_data() -> None:
    degrees = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}
    world = OneOfMany(degrees, {"dp_replicate": 1, "dp_shard": 2, "tp": 1})
    assert (world.size, world.data_ranks, world.data_rank) == (48, 6, 5)
    assert OneOfMany(degrees, {"dp_replicate": 1}).data_rank == 3
    assert OneOfMany(degrees, {"pp": 1, "cp": 1, "tp": 1}).data_rank == 0
    assert world.is_first_along("layers", "sequence")
    assert not world.is_first_along("weights")
    assert not world.is_first_along("layers", "batch")


def other_version(rank: int) -> str:
    """Return the error if a plugin's version differs between ranks."""
    job = make_job("tiny", {"job.device": "cpu"})
    versions = job.plugin_versions()
    last = versions[-1]
    if int(os.environ["RANK"]) == rank:
        versions[-1] = {**last, "version": "0.0.1"}
    object.__setattr__(job, "plugin_versions", lambda: versions)
    try:
        with join_world(job):
            return "no error"
    except UserError as error:
        return f"{last['name']}: {last['version']}: {error}"


def test_rank_0_names_the_ranks_that_did_not_come() -> None:
    patience = timedelta(milliseconds=50)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    store.set("joining/2", "a word")
    with pytest.raises(torch.distributed.DistStoreError, match=r"ranks 1, 3: not here after 0\.05 s"):
        store_of_job(store, 0, 4, patience)


def test_ranks_without_the_address_of_a_store_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    job = make_job("tiny", {"job.device": "cpu"})
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="RANK: is set without MASTER_ADDR; start the ranks with"), join_world(job):
        pass


def test_ranks_with_different_plugin_versions_are_refused(gloo: GlooPool) -> None:
    for report in gloo.run(2, other_version, 1):
        plugin, version, problem = report.split(": ", 2)
        assert problem.startswith("rank 1: its job differs from that of rank 0 in plugins.")
        assert f":{plugin} ('{version}' on rank 0, '0.0.1' here)" in problem


def test_a_single_rank_agrees_with_itself() -> None:
    with join_world(make_job("tiny", {"job.device": "cpu"})) as world:
        require_same_job(make_job("tiny"))
        assert (world.rank, world.size, world.data_rank, world.data_ranks) == (0, 1, 0, 1)
        assert world.sum(torch.ones(2)).tolist() == [1.0, 1.0]
        assert world.gather("a") == ["a"]
        assert world.on_first_rank(lambda: 3) == 3
        with pytest.raises(RuntimeError, match="ValueError"):
            world.on_first_rank(lambda: cast(Callable[[], int], int)("x"))  # type: ignore[call-arg]
        with pytest.raises(UserError, match="here: wrong"):
            world.raise_together(UserError.one("here", "wrong"))
        world.raise_together(None)


def collectives(folder: str) -> list[Any]:
    """Return the results of collectives between four ranks in two islands of two."""
    os.chdir(folder)
    islands = MeshDim("islands", "parallelism.data_parallel_replicate_degree", "batch", diverges=True)
    dims = (islands, *(dim for dim in STANDARD_DIMS if dim.name != "dp_replicate"))
    job = make_job("tiny", {"job.device": "cpu", "parallelism.data_parallel_replicate_degree": 2})
    plan = MeshPlan(dims, {dim.name: 2 if dim.name in ("islands", "dp_shard") else 1 for dim in dims})
    with join_world(replace(job, mesh=plan)) as world:
        numbers = [10.0**world.rank, -float(world.rank)]
        total, most, within = (how(torch.tensor(numbers)).tolist() for how in (world.sum, world.max, world.sum_over_replica))
        return [total, most, within, world.gather(world.data_rank), world.on_first_rank(lambda: world.rank)]


def test_the_collectives_of_a_world(gloo: GlooPool, tmp_path: Any) -> None:
    for rank, report in enumerate(gloo.run(4, collectives, str(tmp_path))):
        within = [11.0, -1.0] if rank < 2 else [1100.0, -5.0]
        assert report == [[1111.0, -6.0], [1000.0, 0.0], within, [0, 1, 2, 3], 0]


def test_a_jobs_identity_depends_on_every_plugin_version() -> None:
    job = make_job("tiny")
    found = job.registry.found
    for number, plugin in enumerate(found.plugins):
        plugins = list(found.plugins)
        plugins[number] = replace(plugin, version=f"{plugin.version}.post1")
        other: AssembledJob = replace(job, registry=replace(job.registry, found=replace(found, plugins=tuple(plugins))))
        assert other.digest() != job.digest()


def test_the_command_frees_what_a_job_leaves_before_python_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def __init__(self) -> None:
            self.part = self  # cyclic, as modules with hooks are

    monkeypatch.setattr("sys.argv", ["titan", "--version"])
    gc.disable()
    try:
        model = weakref.ref(Model())
        assert model() is not None
        assert main() == 0
        assert model() is None
    finally:
        gc.enable()


def gathered(values: list[Any]) -> tuple[list[Any], int, int]:
    """Gather one of ``values`` from each rank; return the result, the number of distinct objects in it, and that of bytes
    that this rank received."""
    received = 0

    def recv(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal received
        received += tensor.nbytes
        return original(tensor, *arguments, **options)

    torch.distributed.init_process_group("gloo")
    original = torch.distributed.recv
    try:
        with patch.object(torch.distributed, "recv", recv):
            found = gather_objects(values[torch.distributed.get_rank()])
        return found, len(set(map(id, found))), received
    finally:
        torch.distributed.destroy_process_group()


def gathered_on_first(values: list[Any]) -> list[tuple[Any, list[tuple[int, int]]]]:
    torch.distributed.init_process_group("gloo")
    try:
        return gather_on_first(values[torch.distributed.get_rank()])
    finally:
        torch.distributed.destroy_process_group()


def test_the_first_rank_alone_gets_the_distinct_values_of_all(gloo: GlooPool) -> None:
    values = ["a", "b" * 1000, "b" * 1000, "a", "a"]
    first, *others = gloo.run(5, gathered_on_first, values)
    assert first == [("a", [(0, 1), (3, 5)]), ("b" * 1000, [(1, 3)])]
    assert others == [[]] * 4


@pytest.mark.parametrize("kinds", [[0, 0], [0, 0, 0, 0], [0, 1, 1, 0], [2, 1, 0], [3, 2, 1, 0, 0, 1, 0]], ids=str)
@pytest.mark.parametrize("length", [1, 10_000])
def test_each_rank_gets_the_values_of_all(gloo: GlooPool, kinds: list[int], length: int) -> None:
    values = [str(kind) * length * (kind + 1) for kind in kinds]
    for found, distinct, received in gloo.run(len(kinds), gathered, values):
        assert found == values
        assert distinct == len(set(kinds))
        rounds = (len(kinds) - 1).bit_length() + 1  # its children and its parent
        if distinct == 1 or length == 1:
            assert received <= 512 * rounds  # digests or short values only
        else:
            assert received <= rounds * (1024 + sum(map(len, set(values))))


def summed(parts: list[list[float]]) -> tuple[list[float], list[float], float]:
    """Return two sums over trees that are under way at the same time, the second over all ranks but the last, and a
    maximum."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        replicas = [torch.distributed.new_group(ranks) for ranks in (range(size - 1), [size - 1])]
        plan = MeshPlan(STANDARD_DIMS, {dim.name: size if dim.name == "dp_shard" else 1 for dim in STANDARD_DIMS})
        world = World(rank, torch.device("cpu"), plan, cast(Any, None), cast(Any, replicas[rank == size - 1]))
        mine = torch.tensor(parts[rank], dtype=torch.float64).repeat_interleave(2)[::2]  # not contiguous
        with patch("titan_core.api.parallel.world.LONGEST_RING", 1):
            of_replica = world.sum_later(mine * 2, over_replica=True)
            of_all = world.sum_later(mine.clone())
            sums = of_all().tolist()
            return sums, of_replica().tolist(), float(world.max(mine)[0])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7])
def test_sums_over_a_tree_are_the_same_on_all_ranks(gloo: GlooPool, size: int) -> None:
    parts = [[0.1 * 3**rank, float(rank)] for rank in range(size)]
    found = gloo.run(size, summed, parts)
    sums, of_replica, largest = found[0]
    assert sums == pytest.approx([sum(part[at] for part in parts) for at in (0, 1)], rel=1e-14)
    assert of_replica == pytest.approx([2 * sum(part[at] for part in parts[:-1]) for at in (0, 1)], rel=1e-14)
    assert largest == parts[-1][0]
    assert found == [(sums, of_replica, largest)] * (size - 1) + [(sums, [2 * part for part in parts[-1]], largest)]


def summed_without(lost: int) -> tuple[str, bool] | None:
    """Return the error of a sum over a tree that the rank ``lost`` has left, and whether it counts as another rank's."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    try:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        plan = MeshPlan(STANDARD_DIMS, {dim.name: size if dim.name == "dp_shard" else 1 for dim in STANDARD_DIMS})
        world = World(rank, torch.device("cpu"), plan, cast(Any, None))
        with patch("titan_core.api.parallel.world.LONGEST_RING", 1):
            assert world.sum(torch.ones(1))[0] == size  # all are connected
            if rank == lost:
                return None
            try:
                world.sum_later(torch.ones(1))()
            except RuntimeError as error:
                return str(error), caused_by_peer(error)
        raise AssertionError("the sum has ended without a rank")
    finally:
        gc.collect()  # an error keeps the connections, which the end of a process would close
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_sum_over_a_tree_ends_if_a_rank_is_lost(gloo: GlooPool, lost: int) -> None:
    """Its root, an inner rank, and a leaf."""
    found = gloo.run(4, summed_without, lost)
    for answer in found[:lost] + found[lost + 1 :]:
        assert answer is not None
        error, of_peer = answer
        assert re.search("closed by peer|reset by peer|[Tt]imed out", error), error
        assert of_peer, error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (FileNotFoundError(2, "No such file", "a"), "FileNotFoundError(2, 'No such file')"),
        (HTTPError("http://a", 404, "Not Found", Message(), None), "OSError('HTTPError: HTTP Error 404: Not Found')"),
        (KeyError("a"), "RuntimeError(\"KeyError('a')\")"),
    ],
)
def test_an_error_reaches_other_ranks_as_one_that_they_can_unpickle(error: Exception, shown: str) -> None:
    assert repr(pickle.loads(pickle.dumps(portable(error)))) == shown


def trained(dump_folder: str, longest_ring: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a tiny job; return its losses and final weights."""
    with patch("titan_core.api.parallel.world.LONGEST_RING", longest_ring):
        overrides = {**TINY, "training.local_batch_size": 1, "job.device": "cpu", "job.dump_folder": dump_folder}
        record = run_recipe("tiny", overrides, weights=True)
    return record.losses, record.final


@pytest.mark.full
def test_a_job_trains_alike_over_a_tree_and_in_a_ring(gloo: GlooPool, tmp_path: Path) -> None:
    ring, tree = (gloo.run(4, trained, str(tmp_path / str(longest)), longest) for longest in (32, 1))
    assert [losses for losses, _ in tree] == [tree[0][0]] * 4
    for (losses, weights), (expected_losses, expected) in zip(tree, ring, strict=True):  # sums of another order
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor)


def limited(hard: int, connections: int) -> tuple[str, int]:
    """Return the error of :func:`allow_open_files` with a hard limit on open files, and the soft limit afterwards."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(100, hard), hard))
    error = ""
    try:
        allow_open_files(connections)
    except UserError as refused:
        error = str(refused)
    return error, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` in a process of its own, because no process can raise its hard limit again."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *arguments).result()


def test_the_limit_on_open_files_is_raised_and_checked() -> None:
    assert in_new_process(limited, 2000, 1000) == ("", 2000)
    error, limit = in_new_process(limited, 1000, 3 * 4096)
    assert limit == 1000
    assert error.startswith(
        "ulimit -n: allows 1000 open files (hard limit 1000), but this process needs 12352: 12288 connec"
    )
    assert "--ulimit nofile=65536" in error
    error, _ = in_new_process(limited, 1000, 131072)
    assert "this process needs 131136: 131072 connections; raise the hard limit to 131136" in error


def test_a_rank_checks_the_limit_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is connected to all ranks; the others, unless gloo connects all at once, to few."""
    from titan_core.loop import world as joining

    class Stop(Exception):
        pass

    asked: list[int] = []

    def stop(connections: int) -> None:
        asked.append(connections)
        raise Stop

    monkeypatch.setattr(joining, "allow_open_files", stop)
    job = make_job("tiny", {"job.device": "cpu", "training.global_batch_size": 16384}, 4096)
    for rank, lazy in (("0", None), ("7", None), ("7", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
        if lazy is not None:
            monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
        with pytest.raises(Stop), join_world(job):
            raise AssertionError
    assert asked == [4096 + 26, 26, 2 * 4096]
