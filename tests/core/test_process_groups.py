"""The process groups and the device of a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from titan_core.api import JobMesh, MeshDim, MeshPlan, MeshView, UserError
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.loop.world import _replica_group, join_world, require_own_gpu
from titan_core.toolkit.device import attention_kernels, backend_for, choose_device
from titan_core.torch_private import process_groups
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job


def groups(degrees: dict[str, int], ep: int, shards: bool = True) -> tuple[list[list[int]], str]:
    """Return the ranks of all groups of this rank, and why its replica's group is wrong, if it is."""
    island = MeshDim("island", "a.b", "batch", diverges=True)
    dims = (island, *STANDARD_DIMS)
    views = (MeshView("ep", "a.b", ("dp_shard", "cp") if shards else ("cp",), shards),) if ep > 1 else ()
    plan = MeshPlan(dims, {dim.name: degrees.get(dim.name, 1) for dim in dims}, views, {"ep": ep} if ep > 1 else {})
    dist.init_process_group("gloo")
    try:
        mesh = JobMesh(plan, "cpu")
        replica = _replica_group(plan)
        numbers = [dist.get_process_group_ranks(group) for group in process_groups()]
        total = torch.ones(1)
        dist.all_reduce(total, group=replica)
        if ep > 1:
            dist.all_reduce(total, group=mesh["ep"].get_group())
        wrong = "" if total.item() == plan.world_size // plan.diverging_replicas * ep else str(total)
        return sorted(numbers), wrong
    finally:
        dist.destroy_process_group()


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("degrees", "ep", "number"),
    [
        ({"dp_shard": 4}, 1, 1),  # the dimension is the world
        ({"dp_shard": 2, "tp": 2}, 1, 3),
        ({"dp_shard": 2, "cp": 2}, 2, 3),  # the view and its remainder are dimensions, and the data mesh is the world
        ({"dp_shard": 2, "cp": 2}, 4, 4),  # the view is the world; its remainder has one rank
        ({"tp": 4}, 1, 2),  # dp_shard has one rank
        pytest.param({"island": 2, "dp_shard": 2}, 1, 3, marks=pytest.mark.full),  # a replica is a mesh dimension
    ],
    ids=str,
)
def test_cpu_meshes_of_the_same_ranks_share_a_group(gloo: GlooPool, degrees: dict[str, int], ep: int, number: int) -> None:
    for ranks, wrong in gloo.run(4, groups, degrees, ep):
        assert wrong == ""
        assert len(ranks) == len({tuple(group) for group in ranks}) == number


def test_a_view_without_parameters_has_no_data_mesh(gloo: GlooPool) -> None:
    """Only the world, the dimensions, the view and its remainder."""
    for ranks, wrong in gloo.run(8, groups, {"dp_shard": 2, "cp": 4}, 2, False):
        assert wrong == ""
        assert sorted(map(len, ranks)) == [2, 2, 2, 4, 8]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine with GPUs, as far as choosing one is concerned: ``gpus.count`` of them, and the chosen one."""
    machine = SimpleNamespace(count=2, chosen=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine.count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(machine, "chosen", device.index))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: machine.chosen is not None)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # to be restored, whatever a test sets
        monkeypatch.delenv(name)
    return machine


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 0, 0), (8, 3, 3), (1, 0, 0), (1, 3, 0)])
def test_a_rank_uses_the_gpu_of_its_number_or_the_only_one(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, index: int
) -> None:
    gpus.count = count
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", index)
    assert gpus.chosen == index


def test_more_ranks_than_gpus_are_refused_and_a_gpu_where_there_is_none(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="local rank 2: this machine has only 2 CUDA devices"):
        choose_device("cuda")
    gpus.count = 0
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="torch finds no CUDA device"):
        choose_device("cuda")


def test_the_allocator_extends_segments(gpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        choose_device("cuda")
        choose_device("cuda")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert [record.getMessage() for record in caplog.records] == [
        "GPU memory: expandable_segments (PYTORCH_ALLOC_CONF is not set)"
    ]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_setting_of_the_allocator_stays(gpus: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    choose_device("cuda")
    settings = {key: value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")}
    assert settings == {name: "max_split_size_mb:64"}


def test_the_allocator_is_not_configured_for_a_job_on_the_cpu(gpus: Any) -> None:
    assert choose_device("cpu") == torch.device("cpu") and backend_for(torch.device("cpu")) == "gloo"
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def meet(uuids: list[str]) -> str:
    """Return the error about shared GPUs that this rank raises, if any."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    properties = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[rank])  # type: ignore[assignment,return-value]
    try:
        require_own_gpu(store, rank, len(uuids), torch.device("cuda", 0))
    except UserError as error:
        return str(error)
    finally:
        torch.cuda.get_device_properties = properties  # type: ignore[assignment]
    return ""


def test_ranks_that_share_a_gpu_are_refused_on_every_rank(gloo: GlooPool) -> None:
    assert gloo.run(4, meet, ["a", "b", "c", "d"]) == [""] * 4
    for report in gloo.run(4, meet, ["a", "b", "a", "a"]):
        assert report.startswith("ranks 0, 2-3: use the same GPU: GPU a of ")
        assert "start at most one rank per GPU" in report


def join(values: list[str | None]) -> str:
    """Join with this rank's value of TORCH_GLOO_LAZY_INIT; return the error, if any."""
    if (value := values[int(os.environ["RANK"])]) is not None:
        os.environ["TORCH_GLOO_LAZY_INIT"] = value
    try:
        settings = {"job.device": "cpu", "training.global_batch_size": 4 * len(values)}
        with join_world(make_job("tiny", settings, len(values))) as world:
            return f"joined {world.size}"
    except UserError as error:
        return str(error)


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "report"),
    [
        ([None, "1", "true"], "joined 3"),
        (["0", "no"], "joined 2"),
        ([None, "1", "0"], "TORCH_GLOO_LAZY_INIT: is on for ranks 0-1 and off for rank 2, which cannot connect; give it"),
        (["maybe"], "TORCH_GLOO_LAZY_INIT: is 'maybe', neither on nor off; set it to 1 or 0, or unset it"),
        (["0", None], "TORCH_GLOO_LAZY_INIT: is on for rank 1 and off for rank 0, which cannot connect; give it"),
    ],
    ids=str,
)
def test_ranks_that_connect_at_different_times_are_refused_on_every_rank(
    gloo: GlooPool, values: list[str | None], report: str
) -> None:
    """gloo would crash."""
    for answer in gloo.run(len(values), join, values):
        assert answer.startswith(report)


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_joining_leaves_the_choice_of_when_gloo_connects(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Ranks of a later group without a job would otherwise differ from ranks that have had no job: gloo would crash."""
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", value)
    with join_world(make_job("tiny", {"job.device": "cpu"})):
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == (value or "1")
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == value


def test_nccl_is_bound_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL then connects at once, and the groups of a mesh are split from that of all ranks."""
    from titan_core.loop import world as joining

    class Stop(Exception):
        pass

    given: dict[str, Any] = {}

    def init(backend: str, **options: Any) -> None:
        given.update(options, backend=backend)
        raise Stop

    monkeypatch.setattr(joining, "choose_device", lambda choice: torch.device("cuda", 0))
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(Stop), joining.join_world(make_job("tiny")):
        raise AssertionError
    assert (given["backend"], given["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))


@pytest.mark.parametrize(("capability", "first"), [((9, 0), ["cudnn", "flash"]), ((8, 0), ["flash", "cudnn"])])
def test_the_order_of_attention_kernels_is_fixed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int], first: list[str]
) -> None:
    def state() -> tuple[Any, ...]:
        kernels = ("cudnn", "flash", "mem_efficient", "math")
        enabled = [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in kernels]
        return *enabled, torch._C._get_sdp_priority_order()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = state()
    with caplog.at_level("INFO"), attention_kernels(torch.device("cuda", 0)):
        *enabled, order = state()
        assert enabled == [True] * 4
        names = [SDPBackend(int(kernel)).name.removesuffix("_ATTENTION").lower() for kernel in order[:4]]
        assert names == [*first, "efficient", "math"]
    assert state() == before
    assert caplog.messages == [f"attention kernels, in order of preference: {', '.join(names)}"]
    with attention_kernels(torch.device("cpu")):
        assert state() == before
