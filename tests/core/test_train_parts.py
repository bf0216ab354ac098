"""The small parts of the training loop, each by itself, against numbers worked out by hand."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from harness.gloo_pool import GlooPool
from harness.jobs import make_job
from titan_core.config.sections import TrainingSection, ValidationSection
from titan_core.data.batch import IGNORE, Batch
from titan_core.data.loader import StepData
from titan_core.errors import UserError
from titan_core.job.job import Job
from titan_core.job.mesh_plan import STANDARD_DIMS, MeshDim, MeshPlan
from titan_core.train import late_reports, stopwatch
from titan_core.train.device import backend_for, choose_device
from titan_core.train.events import Finding, StepReport
from titan_core.train.finite_guard import MOST_SKIPPED, FiniteGuard, NonFiniteError
from titan_core.train.grad_norm import clip_gradients, global_norm, local_gradients
from titan_core.train.interruption import CLOSING, Interruption
from titan_core.train.late_reports import LateReports
from titan_core.train.lookahead import Lookahead
from titan_core.train.loss import cross_entropy_sum
from titan_core.train.seeds import prepare_numerics
from titan_core.train.shared_request import SharedRequest, SharedRequests
from titan_core.train.step import GradientAccumulation
from titan_core.train.stopwatch import Stopwatch
from titan_core.train.validation import Validation
from titan_core.train.world import World, join_world, require_same_job

CPU = torch.device("cpu")
ISLANDS = MeshDim("islands", "local_sgd.islands", "batch", copies=True)


class OneOfMany(World):
    """A rank of a mesh that is not there: a sum over ranks is what the others would have added."""

    others: Any = 0

    def __init__(self, degrees: dict[str, int], at: dict[str, int] | None = None, extra: tuple[MeshDim, ...] = ()) -> None:
        dims = (*extra, *STANDARD_DIMS)
        plan = MeshPlan(dims, {dim.name: degrees.get(dim.name, 1) for dim in dims})
        super().__init__(rank=0, device=CPU, plan=plan, mesh=cast(Any, None))
        object.__setattr__(self, "at", at or {})
        object.__setattr__(self, "summed", [])

    def coordinate(self, dim: str) -> int:
        return cast(Any, self).at.get(dim, 0)

    def sum(self, tensor: Tensor) -> Tensor:
        cast(Any, self).summed.append(tensor.clone())
        return tensor + self.others

    def sum_over_copy(self, tensor: Tensor) -> Tensor:
        return self.sum(tensor)

    def gather(self, value: Any) -> list[Any]:
        return [value]


# -- gradient norm


@pytest.mark.parametrize(("norm", "factor"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (2.0, 0.5), (80.0, 1 / 80)])
@pytest.mark.parametrize("pieces", [1, 4])
def test_clipping_scales_down_and_never_up(norm: float, factor: float, pieces: int) -> None:
    gradients = {1: [torch.full((2,), 3.0), torch.full((1,), 5.0)], pieces: [torch.full((3,), 7.0)]}
    before = {key: [one.clone() for one in tensors] for key, tensors in gradients.items()}
    clip_gradients(gradients, torch.tensor(norm), max_norm=1.0)
    for key, tensors in before.items():
        for one, other in zip(tensors, gradients[key], strict=True):
            torch.testing.assert_close(other, one * factor, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize(
    ("degrees", "pieces", "weight"),
    [
        ({}, 1, 1.0),
        ({"dp_shard": 4}, 4, 1.0),  # a quarter of it is here
        ({"dp_shard": 4}, 1, 1 / 4),  # each of four ranks has all of it
        ({"dp_replicate": 2, "dp_shard": 2}, 2, 1 / 2),
        ({"tp": 2, "dp_shard": 2}, 4, 1.0),
        ({"pp": 2, "dp_shard": 2}, 2, 1.0),  # ranks of another stage have none of it
        ({"pp": 4}, 1, 1.0),
    ],
    ids=str,
)
def test_each_element_counts_once_in_the_norm(degrees: dict[str, int], pieces: int, weight: float) -> None:
    world = OneOfMany(degrees)
    assert global_norm({pieces: [torch.tensor([3.0, 4.0])]}, world).item() == pytest.approx(5.0 * math.sqrt(weight))


def test_the_norm_is_over_all_groups_and_all_ranks_of_the_copy() -> None:
    world = OneOfMany({"dp_shard": 2})
    object.__setattr__(world, "others", 11.0)  # the squares that the other rank has
    norm = global_norm({2: [torch.tensor([1.0]), torch.tensor([2.0])], 1: [torch.tensor([4.0])]}, world)
    assert norm.item() == pytest.approx(math.sqrt(1 + 4 + 16 / 2 + 11))
    assert global_norm({}, OneOfMany({})).item() == 0.0
    # Each copy of the weights has a norm of its own: within it, nobody else holds this element.
    assert global_norm({1: [torch.tensor([2.0])]}, OneOfMany({"islands": 2}, extra=(ISLANDS,))).item() == 2.0


def norms_of_dtensors(folder: str) -> list[float]:
    """Gradients of every kind of DTensor: what this rank says of their norm, and the norm of the whole gradients."""
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

    os.chdir(folder)
    with join_world(make_job("llama3_debug", {"parallelism.tensor_parallel_degree": 2, "job.device": "cpu"})) as world:
        parameters, wholes = [], []
        kinds: list[list[Placement]] = [
            [Shard(0), Shard(1)],
            [Replicate(), Shard(0)],
            [Shard(0), Replicate()],
            [Replicate()] * 2,
        ]
        for number, placements in enumerate(kinds):
            whole = torch.arange(12.0).view(4, 3) + number
            parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 3), world.mesh, placements))
            parameter.grad = distribute_tensor(whole.clone(), world.mesh, placements)
            parameters.append(parameter)
            wholes.append(whole)
        summed = nn.Parameter(distribute_tensor(torch.zeros(4), world.mesh, [Replicate()] * 2))
        mine = torch.full((4,), 1.0 + world.coordinate("tp"))  # 1 on one rank, 2 on the other: 3 together
        summed.grad = DTensor.from_local(mine, world.mesh, [Replicate(), Partial()])
        parameters += [summed, nn.Parameter(torch.zeros(2))]  # the last has no gradient
        wholes.append(torch.full((4,), 3.0))
        gradients = local_gradients(parameters)
        norm = global_norm(gradients, world).item()
        assert isinstance(summed.grad, DTensor)
        assert summed.grad.placements == (Replicate(), Replicate())
        assert torch.equal(summed.grad.to_local(), wholes[-1])
        clip_gradients(gradients, torch.tensor(2.0), max_norm=1.0)  # what is clipped is what the optimizer takes
        for parameter, whole in zip(parameters, wholes, strict=False):
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), whole / 2)
        return [norm, torch.cat([one.flatten() for one in wholes]).norm().item()]


def test_the_norm_of_dtensors_is_that_of_the_whole_gradients(gloo: GlooPool, tmp_path: Any) -> None:
    for norm, expected in gloo.run(4, norms_of_dtensors, str(tmp_path)):
        assert norm == pytest.approx(expected, rel=1e-6)


# -- the mesh


def test_places_of_ranks_that_see_the_same() -> None:
    degrees = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}
    world = OneOfMany(degrees, {"dp_replicate": 1, "dp_shard": 2, "tp": 1})
    assert (world.size, world.data_ranks, world.data_rank) == (48, 6, 5)
    assert OneOfMany(degrees, {"dp_replicate": 1}).data_rank == 3
    assert OneOfMany(degrees, {"pp": 1, "cp": 1, "tp": 1}).data_rank == 0
    assert world.is_first_along("layers", "sequence")
    assert not world.is_first_along("weights")
    assert not world.is_first_along("layers", "batch")


def other_version(rank: int) -> str:
    """On one rank, a plugin has another version than on the other."""
    job = make_job("llama3_debug", {"job.device": "cpu"})
    versions = job.plugin_versions()
    if int(os.environ["RANK"]) == rank:
        versions[-1] = {**versions[-1], "version": "0.0.1"}
    object.__setattr__(job, "plugin_versions", lambda: versions)
    try:
        with join_world(job):
            return "no error"
    except UserError as error:
        return f"{versions[-1]['name']}: {error}"


def test_ranks_with_other_plugin_versions_are_refused(gloo: GlooPool) -> None:
    for told in gloo.run(2, other_version, 1):
        plugin, _, problem = told.partition(": ")
        assert problem.startswith("rank 1: its job differs from rank 0's in plugins.")
        assert f":{plugin} ('0.1.0' on rank 0, '0.0.1' here)" in problem


def test_one_rank_has_the_same_job_as_itself() -> None:
    with join_world(make_job("llama3_debug", {"job.device": "cpu"})) as world:
        require_same_job(make_job("llama3_debug"))
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
    """What the four ranks of two islands, with two ranks each, agree on."""
    os.chdir(folder)
    islands = MeshDim("islands", "parallelism.data_parallel_replicate_degree", "batch", copies=True)
    dims = (islands, *(dim for dim in STANDARD_DIMS if dim.name != "dp_replicate"))
    job = make_job("llama3_debug", {"job.device": "cpu", "parallelism.data_parallel_replicate_degree": 2})
    plan = MeshPlan(dims, {dim.name: 2 if dim.name in ("islands", "dp_shard") else 1 for dim in dims})
    with join_world(replace(job, facts=replace(job.facts, mesh=plan))) as world:
        numbers = [10.0**world.rank, -float(world.rank)]
        total, most, within = (how(torch.tensor(numbers)).tolist() for how in (world.sum, world.max, world.sum_over_copy))
        return [total, most, within, world.gather(world.data_rank), world.on_first_rank(lambda: world.rank)]


def test_the_collectives_of_a_world(gloo: GlooPool, tmp_path: Any) -> None:
    for rank, told in enumerate(gloo.run(4, collectives, str(tmp_path))):
        within = [11.0, -1.0] if rank < 2 else [1100.0, -5.0]
        assert told == [[1111.0, -6.0], [1000.0, 0.0], within, [0, 1, 2, 3], 0]


# -- looking ahead


class Loader:
    """Gives one step's data, or raises."""

    def __init__(self, step: StepData | UserError | None) -> None:
        self.step = step

    def peek(self) -> StepData | None:
        if isinstance(self.step, UserError):
            raise self.step
        return self.step


STEP = StepData([], epoch=0, targets_by_dataset=[5, 2], corrupt=3, empty=4)


def look(world: World, step: StepData | UserError | None, requests: SharedRequests | None = None) -> Any:
    return Lookahead(cast(Any, Loader(step)), world, requests or SharedRequests(), datasets=2).look()


def test_totals_are_sums_over_ranks() -> None:
    totals = look(OneOfMany({}), STEP)
    assert (totals.num_targets, totals.copy_targets, totals.by_dataset) == (7, 7, [5, 2])
    assert (totals.corrupt, totals.empty) == (3, 4)
    assert not totals.data_ended
    world = OneOfMany({"dp_shard": 2})
    object.__setattr__(world, "others", torch.tensor([0, 0, 0, 1, 2, 10, 20]))  # ended, mistake, skips; left out; targets
    totals = look(world, STEP)
    assert (totals.num_targets, totals.by_dataset, totals.corrupt, totals.empty) == (37, [15, 22], 4, 6)
    assert not totals.data_ended


@pytest.mark.parametrize(("dim", "counted"), [("tp", 0), ("pp", 0), ("cp", 0), ("dp_shard", 7), ("dp_replicate", 7)])
def test_ranks_that_see_the_same_tokens_count_them_once(dim: str, counted: int) -> None:
    world = OneOfMany({dim: 2}, {dim: 1})
    assert look(world, STEP).num_targets == counted
    assert cast(Any, world).summed[0].tolist() == [0, 0, 0, *([3, 4, 5, 2] if counted else [0] * 4)]


def test_one_ranks_end_is_the_end_of_all() -> None:
    assert look(OneOfMany({}), None).data_ended
    world = OneOfMany({"dp_shard": 2})
    object.__setattr__(world, "others", torch.tensor([1, 0, 0, 0, 0, 0, 0]))
    assert look(world, STEP).data_ended


def test_one_ranks_mistake_is_an_error() -> None:
    with pytest.raises(UserError, match="the data: is bad"):
        look(OneOfMany({}), UserError.one("the data", "is bad"))


def test_requests_travel_with_the_totals() -> None:
    mine, theirs, none = SharedRequest(), SharedRequest(), SharedRequest()
    mine.ask()
    world = OneOfMany({"dp_shard": 2})
    object.__setattr__(world, "others", torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 0, 0]))
    look(world, STEP, SharedRequests([mine, theirs, none]))
    assert cast(Any, world).summed[0].tolist() == [0, 0, 0, 1, 0, 0, 3, 4, 5, 2]
    assert [one.agreed for one in (mine, theirs, none)] == [True, True, False]
    assert [one.asked for one in (mine, theirs, none)] == [False, False, False]


def test_a_copys_targets_are_those_of_its_ranks() -> None:
    world = OneOfMany({"islands": 2}, extra=(ISLANDS,))
    object.__setattr__(world, "sum", lambda tensor: tensor + torch.tensor([0, 0, 0, 0, 0, 100, 0]))
    object.__setattr__(world, "sum_over_copy", lambda tensor: tensor + 1)
    totals = look(world, STEP)
    assert (totals.num_targets, totals.copy_targets) == (107, 8)


def test_a_request_is_taken_once_and_asked_again_meanwhile() -> None:
    request = SharedRequest()
    assert not request.take()
    request.ask()
    assert not request.take()  # the others do not know yet
    request.agree(told=True, anywhere=True)
    assert not request.asked
    request.agree(told=False, anywhere=False)  # at the next step, where it was not taken yet
    request.ask()  # while it is agreed on: it counts for the next time
    request.agree(told=False, anywhere=False)
    assert request.asked
    assert request.take()
    assert not request.take()


def test_requests_are_complete_once_training_begins() -> None:
    requests = SharedRequests([SharedRequest()])
    assert len(list(requests)) == 1
    new = requests.new()
    assert list(requests)[1] is new
    requests.complete(OneOfMany({}))
    with pytest.raises(RuntimeError, match="after titan_train_start"):
        requests.new()


# -- a step


def test_the_loss_is_a_sum_in_fp32_over_what_is_a_target() -> None:
    logits = torch.tensor([[[2.0, 0.0], [1.0, 1.0], [0.0, 5.0]]], dtype=torch.bfloat16)
    targets = torch.tensor([[0, 1, IGNORE]])
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-2)) + math.log(2), rel=1e-6)


class Line(nn.Module):
    """``weight * tokens`` for logits of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight * tokens


def test_microbatches_add_up_to_the_mean_over_the_global_batch() -> None:
    from titan_core.model.part import ModelPart

    module = Line()
    part = ModelPart(module, cast(Any, None), lambda outputs, targets: outputs.sum())
    batches = [Batch(torch.tensor([[value]]), torch.zeros(1, 1)) for value in (1.0, 2.0, 5.0)]
    run = GradientAccumulation(part)
    share = run(batches, num_targets=4)
    assert (share.item(), share.requires_grad) == (2.0 * 8.0 / 4, False)
    assert module.weight.grad is not None
    assert module.weight.grad.item() == 8.0 / 4
    assert run.evaluate(batches).item() == 16.0
    assert module.weight.grad.item() == 8.0 / 4


# -- devices


def test_the_device_is_the_one_that_is_wanted_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of two made-up GPUs, and on one of none."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("cpu") == CPU
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)] * 2
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="local rank 2: this machine has 2 CUDA devices"):
        choose_device("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(UserError, match="torch sees no CUDA device"):
        choose_device("cuda")
    assert (backend_for(CPU), backend_for(torch.device("cuda"))) == ("gloo", "cpu:gloo,cuda:nccl")


# -- seeds


@pytest.fixture
def generators() -> Iterator[None]:
    """What a test sets of torch's global settings is undone."""
    python, cpu, precision = random.getstate(), torch.get_rng_state(), torch.get_float32_matmul_precision()
    yield
    random.setstate(python)
    torch.set_rng_state(cpu)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


def drawn(seed: int, world: World) -> tuple[float, float]:
    prepare_numerics(TrainingSection(seed=seed), world)
    return random.random(), torch.rand(1).item()


@pytest.mark.usefixtures("generators")
def test_seeds_differ_by_seed_and_by_what_a_rank_sees() -> None:
    here = drawn(1, OneOfMany({"dp_shard": 2, "tp": 2}))
    assert drawn(1, OneOfMany({"dp_shard": 2, "tp": 2}, {"tp": 1})) == here
    others = [drawn(1, OneOfMany({"dp_shard": 2}, {"dp_shard": 1})), drawn(2, OneOfMany({})), drawn(0, OneOfMany({}))]
    for other in others:
        assert other[0] != here[0]
        assert other[1] != here[1]
    assert len(set(others)) == 3
    drawn(2**63 - 1, OneOfMany({}))  # the largest that the config allows


@pytest.mark.usefixtures("generators")
def test_numerics_are_set_as_the_config_says() -> None:
    prepare_numerics(TrainingSection(float32_matmul_precision="medium", deterministic=True), OneOfMany({}))
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    prepare_numerics(TrainingSection(), OneOfMany({}))
    assert torch.get_float32_matmul_precision() == "highest"


# -- watching


def report(step: int, loss: float = 1.0, norm: float = 1.0) -> StepReport:
    return StepReport(step, torch.tensor(loss), torch.tensor([loss]), torch.tensor(norm), 0.1, 4, 0, 0.0)


class Looks(LateReports):
    """Keeps what it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[int] = []

    def look(self, report: StepReport) -> None:
        assert report.loss.item() == report.step
        self.looked.append(report.step)


def test_a_cpus_steps_are_looked_at_at_once() -> None:
    looks = Looks()
    looks.titan_step_end(report(1, 1.0))
    looks.titan_settle(1)
    looks.titan_settle(1)
    assert looks.looked == [1]


def test_a_gpus_steps_are_looked_at_when_the_next_one_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors that say that they are a GPU's."""
    waited: list[int] = []

    class Copy:
        def __init__(self, tensors: list[Any]) -> None:
            self.step = tensors[0].step

        def wait(self) -> list[Tensor]:
            waited.append(self.step)
            return [torch.tensor(float(self.step)), torch.tensor([0.0]), torch.tensor(2.0)]

    monkeypatch.setattr(late_reports, "HostCopy", Copy)
    looks = Looks()
    for step in (1, 2, 3):
        looks.titan_step_end(replace(report(step), loss=cast(Any, SimpleNamespace(is_cuda=True, step=step))))
        assert looks.looked == waited == list(range(1, step))
    looks.titan_settle(3)
    looks.titan_settle(3)
    assert looks.looked == [1, 2, 3]


def test_the_stopwatch_adds_up_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 25.0, 30.0, 30.5])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(CPU)
    for name in ("a", "b", "a"):
        with watch.phase(name):
            pass
    assert watch.take() == {"a": 7.0, "b": 1.0}
    with watch.phase("b", on_host=True):
        pass
    assert watch.take() == {"b": 0.5}
    assert watch.take() == {}


def guard(action: Any) -> tuple[FiniteGuard, list[Finding]]:
    found: list[Finding] = []
    one = FiniteGuard(action)
    one.titan_train_start(cast(Any, SimpleNamespace(tell=found.append, world=OneOfMany({}))))
    return one, found


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_is_skipped_told_or_the_end(loss: float, norm: float) -> None:
    bad, good = report(3, loss, norm), report(2)
    skip, found = guard("skip")
    assert not skip.titan_before_update(cast(Any, good))
    assert skip.titan_before_update(cast(Any, bad))
    skip.look(bad)  # it is dealt with
    assert [one.step for one in found] == [3]
    warn, found = guard("warn")
    assert not warn.titan_before_update(cast(Any, bad))
    warn.look(bad)
    assert [one.step for one in found] == [3]
    stop, found = guard("stop")
    assert not stop.titan_before_update(cast(Any, bad))
    stop.look(good)
    with pytest.raises(NonFiniteError, match="step 3: the loss is"):
        stop.look(bad)


def test_too_many_bad_steps_in_a_row_are_the_end_also_over_restarts() -> None:
    skip, _ = guard("skip")
    bad, good = report(1, math.nan), report(1)
    for _ in range(MOST_SKIPPED - 1):
        assert skip.titan_before_update(cast(Any, bad))
    assert not skip.titan_before_update(cast(Any, good))  # not in a row any more
    for _ in range(MOST_SKIPPED - 1):
        assert skip.titan_before_update(cast(Any, bad))
    again, _ = guard("skip")
    again.titan_restore_state(skip.titan_save_state())
    with pytest.raises(NonFiniteError, match=f"the {MOST_SKIPPED}th such step in a row"):
        again.titan_before_update(cast(Any, bad))


def test_validation_is_due_at_its_frequency_and_at_the_end_once() -> None:
    validation = Validation.__new__(Validation)
    validation._section, validation._measured = ValidationSection(freq=4), None
    assert [step for step in range(1, 13) if validation.is_due(step)] == [4, 8, 12]
    assert validation.is_due(5, last=True)
    validation._measured = 8
    assert not validation.is_due(8)
    assert not validation.is_due(8, last=True)


def test_signals_are_heard_inside_and_left_alone_outside() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Interruption() as interruption:
            assert not interruption.stop.asked
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (interruption.save.asked, interruption.stop.asked) == (True, False)
            os.kill(os.getpid(), signal.SIGTERM)
            assert interruption.stop.asked
            assert heard == []
            os.kill(os.getpid(), signal.SIGTERM)  # the second one is for whoever was there before
            assert heard == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_while_a_run_closes_does_not_speak_of_a_step(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interruption() as interruption:
            interruption.titan_train_start()
            interruption.titan_train_end()
            os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == f"{CLOSING}\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_jobs_identity_changes_with_any_plugins_version() -> None:
    job = make_job("llama3_debug")
    found = job.registry.found
    for number, plugin in enumerate(found.plugins):
        plugins = list(found.plugins)
        plugins[number] = replace(plugin, version=f"{plugin.version}.post1")
        other: Job = replace(job, registry=replace(job.registry, found=replace(found, plugins=tuple(plugins))))
        assert other.digest() != job.digest()
