"""A model that draws random numbers and keeps state in buffers (``noisy`` of :mod:`harness.plugin`) resumes, validates and
recomputes like any other."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from harness.noisy import NOISY
from titan_core.api import UserError, hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, RunRecord, run_recipe, whole
from titan_testing.meshes import DR, PP, TP


class State:
    """Records the state of a run other than weights: buffers, and the states of the random generators."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.buffers: list[dict[str, Tensor]] = []
        self.generators: list[tuple[Any, Tensor]] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.parts = run.parts
        self.before = self._buffers()

    @hookimpl(trylast=True)
    def titan_step_end(self) -> None:
        self.buffers.append(self._buffers())

    @hookimpl(tryfirst=True)  # runs before other observers of the hook
    def titan_before_update(self) -> None:
        self.generators.append((random.getstate(), torch.get_rng_state()))

    def _buffers(self) -> dict[str, Tensor]:
        return {name: whole(one) for part in self.parts for name, one in part.module.named_buffers()}


def run_in(folder: str, overrides: dict[str, object], observers: tuple[Any, ...] = ()) -> tuple[RunRecord, State]:
    """Train the model in ``folder``, and return the record and the final state."""
    os.chdir(folder)
    state = State()
    # A run of another model in the same directory would be refused.
    directory = {"job.dump_folder": f"outputs/{overrides['model.args']}"} if "model.args" in overrides else {}
    record = run_recipe("tiny", {**NOISY, **directory, **overrides}, weights=True, observers=(*observers, state))
    del state.parts
    return record, state


def require_equal(one: tuple[RunRecord, State], other: tuple[RunRecord, State], since: int = 0) -> None:
    """Require bitwise equality from the step after ``since`` on."""
    assert other[0].losses == one[0].losses[since:]
    assert other[0].grad_norms == one[0].grad_norms[since:]
    for name, tensor in one[0].final.items():
        assert torch.equal(other[0].final[name], tensor), name
    for here, there in zip(one[1].buffers[since:], other[1].buffers, strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(there[name], tensor) for name, tensor in here.items()), (here, there)
    for (python, cpu), (python_there, cpu_there) in zip(one[1].generators[since:], other[1].generators, strict=True):
        assert python == python_there
        assert torch.equal(cpu, cpu_there)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (1, {"checkpoint.async_mode": "async"}),
        pytest.param(2, {"model.args": "{momentum = 0.0}", "checkpoint.async_mode": "async"}, marks=pytest.mark.full),
        pytest.param(2, {TP: 2}, marks=pytest.mark.full),
        pytest.param(2, {PP: 2, "parallelism.pipeline_parallel_schedule": "1F1B"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_resumed_run_draws_and_counts_as_if_it_had_not_stopped(
    gloo: GlooPool, tmp_path: Path, ranks: int, settings: dict[str, object]
) -> None:
    saved = {**settings, "checkpoint.enable": "true", "checkpoint.interval": 2}
    uninterrupted = gloo.run(ranks, run_in, str(tmp_path), saved)
    resumed = gloo.run(ranks, run_in, str(tmp_path), {**saved, "checkpoint.load_step": 2})
    for one, other in zip(uninterrupted, resumed, strict=True):
        # A background save must also contain the state of its own step, not of the end.
        assert all(torch.equal(other[1].before[name], tensor) for name, tensor in one[1].buffers[1].items())
        require_equal(one, other, since=2)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, State]:
    """Train the model on one device."""
    return run_in(str(tmp_path_factory.mktemp("once")), {})


def test_each_microbatch_is_one_forward_pass(once: tuple[RunRecord, State]) -> None:
    assert [int(one["tok_embeddings.passes"]) for one in once[1].buffers] == [4, 8, 12, 16]
    assert not torch.equal(once[1].buffers[0]["tok_embeddings.running"], once[1].buffers[1]["tok_embeddings.running"])


@pytest.mark.full
def test_what_is_drawn_shows_in_the_losses(once: tuple[RunRecord, State], in_tmp: Path) -> None:
    """Otherwise all comparisons in this file would hold trivially."""
    for other in ("{dropout = 0.0}", "{momentum = 0.0}"):
        assert run_in(str(in_tmp), {"model.args": other})[0].losses != once[0].losses
    python, cpu = run_in(str(in_tmp), {"model.args": "{draws = false}"})[1].generators[-1]
    assert python != once[1].generators[-1][0] and not torch.equal(cpu, once[1].generators[-1][1])
    assert run_in(str(in_tmp), {})[0].losses == once[0].losses


@pytest.mark.parametrize(
    "recomputation",
    [
        {"activation_checkpoint.mode": "full"},
        {"activation_checkpoint.mode": "selective"},
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
    ],
    ids=str,
)
def test_recomputation_draws_the_same_again(
    once: tuple[RunRecord, State], in_tmp: Path, recomputation: dict[str, object]
) -> None:
    require_equal(once, run_in(str(in_tmp), recomputation))


class Draws:
    """An observer that draws from every generator in every hook that training calls."""

    def draw(self) -> None:
        random.random()
        torch.rand(3)

    titan_train_start = hookimpl(lambda self: self.draw(), specname="titan_train_start")
    titan_step_start = hookimpl(lambda self: self.draw(), specname="titan_step_start")
    titan_before_update = hookimpl(lambda self: self.draw(), specname="titan_before_update")
    titan_step_end = hookimpl(lambda self: self.draw(), specname="titan_step_end")
    titan_validation_end = hookimpl(lambda self: self.draw(), specname="titan_validation_end")
    titan_flush = hookimpl(lambda self: self.draw(), specname="titan_flush")
    titan_checkpoint_saved = hookimpl(lambda self: self.draw(), specname="titan_checkpoint_saved")
    titan_save_state = hookimpl(lambda self: self.draw(), specname="titan_save_state")


def test_observers_change_nothing_that_training_draws(once: tuple[RunRecord, State], in_tmp: Path) -> None:
    """Nor do late imports: Rich draws from Python's generator when it is imported, on the first rank only."""
    saved = {"checkpoint.enable": "true", "checkpoint.interval": 2, **VALIDATED}
    require_equal(once, run_in(str(in_tmp), saved, (Draws(),)))


VALIDATED: dict[str, object] = {
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.freq": 1,
    "validation.steps": 2,
}


def test_validation_leaves_training_as_it_was(once: tuple[RunRecord, State], in_tmp: Path) -> None:
    record, state = run_in(str(in_tmp), VALIDATED)
    assert sorted(record.validation) == [1, 2, 3, 4]
    require_equal(once, (record, state))


@pytest.mark.full
def test_validation_is_without_dropout(in_tmp: Path) -> None:
    still = {**VALIDATED, "optimizer.lr": 1e-15, "training.steps": 2}
    losses = [
        run_in(str(in_tmp), {**still, "model.args": f"{{dropout = {dropout}, draws = false}}"})[0].validation
        for dropout in (0.0, 0.5)
    ]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-6)
    assert losses[0][2] == pytest.approx(losses[1][2], rel=1e-6)
    assert losses[0][1] != losses[0][2]  # the buffer that training updates affects validation


@pytest.mark.full
def test_ranks_that_see_the_same_tokens_draw_the_same(gloo: GlooPool, once: tuple[RunRecord, State], tmp_path: Path) -> None:
    """Each tensor-parallel rank draws the masks of whole hidden states, the same as on one device."""
    divided = {TP: 2, "parallelism.disable_sequence_parallel": "true", "activation_checkpoint.mode": "full"}
    for record, state in gloo.run(2, run_in, str(tmp_path), divided):
        assert record.losses == pytest.approx(once[0].losses, rel=1e-5)
        assert record.grad_norms == pytest.approx(once[0].grad_norms, rel=1e-4)
        for (python, cpu), (python_there, cpu_there) in zip(once[1].generators, state.generators, strict=True):
            assert python == python_there
            assert torch.equal(cpu, cpu_there)
        for here, there in zip(once[1].buffers, state.buffers, strict=True):
            torch.testing.assert_close(there, here)


def test_ranks_that_see_different_tokens_draw_different_numbers(gloo: GlooPool, tmp_path: Path) -> None:
    (first, here), (second, there) = gloo.run(2, run_in, str(tmp_path), {"training.steps": 1})
    assert first.losses == second.losses
    assert here.generators[0][0] != there.generators[0][0]
    assert not torch.equal(here.generators[0][1], there.generators[0][1])
    assert not torch.equal(here.buffers[0]["tok_embeddings.running"], there.buffers[0]["tok_embeddings.running"])


@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.full), "async"])
def test_a_buffer_that_differs_between_ranks_is_refused_after_the_first_step(
    gloo: GlooPool, tmp_path: Path, mode: str
) -> None:
    """Each rank computes the statistic from its own sequences, and a checkpoint would keep only one of them."""
    saved = {"checkpoint.enable": "true", "checkpoint.async_mode": mode, "job.dump_folder": "run"}
    with pytest.raises(
        RuntimeError, match=r"model\.tok_embeddings\.running: differs between ranks 0 and 1, .*persistent=False"
    ):
        gloo.run(2, run_in, str(tmp_path), saved)
    assert not list((tmp_path / "run").glob("checkpoint/step-*/checkpoint.json"))


class Residuals:
    """Keeps a tensor for each rank of data parallelism's shards. Ranks of different replicas have equal ones, or not."""

    def __init__(self, differ: bool) -> None:
        self.differ = differ
        self.tensors: dict[str, Tensor] = {}

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        mesh = run.world.mesh["dp_shard"]
        value = run.world.rank if self.differ else mesh.get_local_rank()
        local = torch.full((3,), float(value))
        self.tensors["residuals.sum"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    @hookimpl
    def titan_state_tensors(self) -> dict[str, Tensor]:
        return self.tensors


def train_with_residuals(folder: str, differ: bool) -> str:
    os.chdir(folder)
    saved: dict[str, object] = {
        "checkpoint.enable": "true",
        "job.dump_folder": "run",
        DR: 2,
        "training.steps": 1,
        "training.global_batch_size": 8,
    }
    try:
        return run_recipe("tiny", {**TINY, **saved}, observers=[Residuals(differ)]).reason
    except UserError as error:
        return str(error)


@pytest.mark.full
def test_state_whose_mesh_lacks_a_dimension_that_it_differs_along_is_refused(gloo: GlooPool, tmp_path: Path) -> None:
    """A checkpoint would keep the shards of one replica."""
    error, *_ = gloo.run(4, train_with_residuals, str(tmp_path), True)
    assert (
        "observers.residuals.sum from [0]: differs between ranks 0 and 2, but a checkpoint contains only one copy" in error
    )
    assert "sharded over all dimensions along which ranks differ" in error
    assert gloo.run(4, train_with_residuals, str(tmp_path), False) == ["all steps are done"] * 4
