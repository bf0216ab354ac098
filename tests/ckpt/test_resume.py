"""A resumed run continues as an uninterrupted run does, on the same or another number of ranks. Other meshes are tested in
``tests/integration/test_resume_on_meshes.py``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.resuming import run_in
from titan_core.api import hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord


@pytest.fixture(scope="module")
def uninterrupted(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return gloo.run(1, run_in, str(tmp_path_factory.mktemp("whole")), {})[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_on_the_same_number_of_ranks_is_bit_for_bit_equal(gloo: GlooPool, tmp_path: Path, ranks: int) -> None:
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    for folder in folders:
        os.mkdir(folder)
    whole = gloo.run(ranks, run_in, folders[0], {})
    first = gloo.run(ranks, run_in, folders[1], {"training.stop_at_step": 5})
    second = gloo.run(ranks, run_in, folders[1], {})
    assert first[0].reason == "training.stop_at_step was reached"
    for one, a, b in zip(whole, first, second, strict=True):
        assert a.losses + b.losses == one.losses
        assert a.grad_norms + b.grad_norms == one.grad_norms
        assert all(torch.equal(b.final[name], tensor) for name, tensor in one.final.items())


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(4, 2, marks=pytest.mark.full), (1, 2), pytest.param(2, 1, marks=pytest.mark.full)]
)
def test_resuming_on_another_number_of_ranks_is_equal_to_rounding(
    gloo: GlooPool, uninterrupted: RunRecord, tmp_path: Path, before: int, after: int
) -> None:
    gloo.run(before, run_in, str(tmp_path), {"training.stop_at_step": 4})
    records = gloo.run(after, run_in, str(tmp_path), {})
    for record in records:
        assert record.losses == pytest.approx(uninterrupted.losses[4:], rel=1e-5)
        assert record.grad_norms == pytest.approx(uninterrupted.grad_norms[4:], rel=1e-4)
    final = {name: tensor for record in records for name, tensor in record.final.items()}
    for name, tensor in uninterrupted.final.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-3, atol=1e-4)


class Signals:
    """Sends this process a signal before the update of a step, on one rank."""

    def __init__(self, step: int, which: signal.Signals, rank: str) -> None:
        self.step, self.which, self.rank = step, which, rank

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        if update.step == self.step and os.environ["RANK"] == self.rank:
            os.kill(os.getpid(), self.which)


@pytest.mark.full
@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.full), "1"])
def test_sigterm_on_one_rank_stops_all_ranks_with_a_checkpoint(gloo: GlooPool, tmp_path: Path, rank: str) -> None:
    whole = gloo.run(2, run_in, str(tmp_path), {"job.dump_folder": "whole"})
    first = gloo.run(2, run_in, str(tmp_path), {}, (Signals(2, signal.SIGTERM, rank),))
    causes = {"SIGTERM", "a signal to another rank"}
    assert {record.reason for record in first} == {f"{one}: stopped after a complete step, to be resumed" for one in causes}
    assert (tmp_path / "outputs/tiny/checkpoint/step-3/checkpoint.json").exists()
    second = gloo.run(2, run_in, str(tmp_path), {})
    assert first[0].losses + second[0].losses == whole[0].losses


def test_sigusr1_requests_a_checkpoint(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(2, run_in, str(tmp_path), {"checkpoint.interval": 100}, (Signals(2, signal.SIGUSR1, "1"),))
    saved = sorted(path.name for path in (tmp_path / "outputs/tiny/checkpoint").iterdir())
    # The exchange for step 3 is under way when the signal arrives; all ranks learn of it in that for step 4.
    assert saved == ["step-4", "step-8"]


class Counts:
    """An observer with state."""

    def __init__(self, name: str) -> None:
        self.name, self.steps, self.restored = name, 0, False

    @hookimpl
    def titan_save_state(self) -> dict[str, int]:
        return {self.name: self.steps}

    @hookimpl
    def titan_restore_state(self, state: dict[str, Any]) -> None:
        self.steps, self.restored = state.get(self.name, 0), True

    @hookimpl
    def titan_step_end(self) -> None:
        self.steps += 1


def counted(folder: str, names: tuple[str, ...], overrides: dict[str, object]) -> list[tuple[int, bool]] | str:
    observers = tuple(Counts(name) for name in names)
    try:
        run_in(folder, overrides, observers)
    except ValueError as error:
        return str(error)
    return [(observer.steps, observer.restored) for observer in observers]


@pytest.mark.full
def test_the_state_of_observers_is_restored_on_more_ranks(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, counted, str(tmp_path), ("a",), {"training.stop_at_step": 5}) == [[(5, False)]] * 2
    # An observer that the first run did not have starts from zero.
    assert gloo.run(4, counted, str(tmp_path), ("a", "b"), {}) == [[(8, True), (3, True)]] * 4


def test_two_observers_cannot_save_state_under_the_same_name(gloo: GlooPool, tmp_path: Path) -> None:
    (message,) = gloo.run(1, counted, str(tmp_path), ("a", "a"), {})
    assert not list(tmp_path.glob("outputs/*/checkpoint/step-*"))  # refused before the first step
    assert message.endswith("titan_save_state returned 'a', which is already in use: names must be unique")


@pytest.mark.full
def test_old_checkpoints_are_removed_and_every_nth_is_kept(gloo: GlooPool, tmp_path: Path) -> None:
    kept = {"checkpoint.interval": 1, "checkpoint.keep_latest_k": 2, "checkpoint.keep_every_n_steps": 3}
    gloo.run(1, run_in, str(tmp_path), kept)
    saved = {path.name for path in (tmp_path / "outputs/tiny/checkpoint").iterdir()}
    assert saved == {"step-3", "step-6", "step-7", "step-8"}


@pytest.mark.full
def test_resuming_from_an_older_step_keeps_its_new_checkpoints(gloo: GlooPool, tmp_path: Path) -> None:
    """Later checkpoints, from before the job resumed from an older step, do not count for the retention policy."""
    every = {"checkpoint.interval": 1, "checkpoint.keep_latest_k": 3}
    gloo.run(1, run_in, str(tmp_path), every)
    gloo.run(1, run_in, str(tmp_path), {**every, "checkpoint.load_step": 6, "training.stop_at_step": 7})
    saved = {path.name for path in (tmp_path / "outputs/tiny/checkpoint").iterdir()}
    assert saved == {"step-6", "step-7", "step-8"}


@pytest.mark.full
def test_patterns_that_exclude_at_the_start_do_not_apply_when_resuming(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(1, run_in, str(tmp_path), {"job.dump_folder": "one"})
    begin = {
        "checkpoint.initial_load_path": "one/checkpoint/step-8",
        "checkpoint.exclude_from_loading": '["model.output.*", "optimizer.*"]',
        "job.dump_folder": "two",
    }
    (first,) = gloo.run(1, run_in, str(tmp_path), {**begin, "training.stop_at_step": 4})
    (second,) = gloo.run(1, run_in, str(tmp_path), begin)
    assert all(torch.equal(second.initial[name], tensor) for name, tensor in first.final.items())
    (whole,) = gloo.run(1, run_in, str(tmp_path), {**begin, "job.dump_folder": "three"})
    assert first.losses + second.losses == whole.losses


@pytest.mark.full
def test_excluded_optimizer_state_starts_from_zero(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(1, run_in, str(tmp_path), {"job.dump_folder": "one"})
    weights = {"checkpoint.initial_load_path": "one/checkpoint/step-8", "training.steps": 10}
    (alone,) = gloo.run(1, run_in, str(tmp_path), {**weights, "job.dump_folder": "alone", "training.stop_at_step": 1})
    both = {"checkpoint.initial_load_model_only": "false", "checkpoint.exclude_from_loading": '["optimizer.*"]'}
    (record,) = gloo.run(1, run_in, str(tmp_path), {**weights, **both, "job.dump_folder": "both"})
    assert len(record.losses) == 2
    moved = {name: (record.final[name] - tensor).abs().max() for name, tensor in record.initial.items()}
    assert all(torch.isfinite(one) and one > 0 for one in moved.values())
    assert all(torch.equal(alone.initial[name], tensor) for name, tensor in record.initial.items())


@pytest.mark.full
def test_another_job_starts_from_the_weights_only(gloo: GlooPool, tmp_path: Path) -> None:
    (one,) = gloo.run(1, run_in, str(tmp_path), {"job.dump_folder": "one"})
    begin = {"checkpoint.initial_load_path": "one/checkpoint/step-8", "job.dump_folder": "two", "training.steps": 3}
    (two,) = gloo.run(1, run_in, str(tmp_path), begin)
    assert len(two.losses) == 3
    assert all(torch.equal(two.initial[name], tensor) for name, tensor in one.final.items())


@pytest.mark.full
def test_excluded_tensors_keep_their_initial_values(gloo: GlooPool, tmp_path: Path) -> None:
    (one,) = gloo.run(1, run_in, str(tmp_path), {"job.dump_folder": "one"})
    begin = {
        "checkpoint.initial_load_path": "one/checkpoint/step-8",
        "checkpoint.exclude_from_loading": '["model.output.*"]',
        "job.dump_folder": "two",
        "training.steps": 1,
    }
    (two,) = gloo.run(1, run_in, str(tmp_path), begin)
    assert torch.equal(two.initial["output.weight"], one.initial["output.weight"])
    assert torch.equal(two.initial["norm.weight"], one.final["norm.weight"])


@pytest.mark.full
def test_a_checkpoint_of_the_initial_weights(gloo: GlooPool, uninterrupted: RunRecord, tmp_path: Path) -> None:
    (none,) = gloo.run(1, run_in, str(tmp_path), {"training.stop_at_step": 0})
    assert none.losses == []
    assert (tmp_path / "outputs/tiny/checkpoint/step-0/checkpoint.json").exists()
    (resumed,) = gloo.run(1, run_in, str(tmp_path), {})
    assert resumed.losses == uninterrupted.losses


@pytest.mark.full
def test_an_export_of_the_weights_only(gloo: GlooPool, tmp_path: Path) -> None:
    export = {"checkpoint.last_save_model_only": "true", "checkpoint.export_dtype": "bfloat16"}
    (one,) = gloo.run(1, run_in, str(tmp_path), export)
    begin = {"checkpoint.initial_load_path": "outputs/tiny/checkpoint/step-8", "job.dump_folder": "two"}
    (two,) = gloo.run(1, run_in, str(tmp_path), {**begin, "training.steps": 1})
    for name, tensor in one.final.items():
        assert torch.equal(two.initial[name], tensor.bfloat16().float())


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        ("file", "async"),
        ("memory", "disabled"),
        pytest.param("file", "disabled", marks=pytest.mark.full),
        pytest.param("memory", "async", marks=pytest.mark.full),
    ],
)
def test_a_url_that_fsspec_supports(gloo: GlooPool, uninterrupted: RunRecord, tmp_path: Path, place: str, mode: str) -> None:
    """Both runs are in the same process, because fsspec's memory:// belongs to the process."""
    url = f"file://{tmp_path}/elsewhere" if place == "file" else f"memory://elsewhere/{mode}"
    elsewhere = {"checkpoint.folder": url, "checkpoint.keep_latest_k": 1, "checkpoint.async_mode": mode}
    gloo.run(1, run_in, str(tmp_path), {**elsewhere, "training.stop_at_step": 4})
    (record,) = gloo.run(1, run_in, str(tmp_path), elsewhere)
    assert record.losses == uninterrupted.losses[4:]
    if place == "file":
        assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["step-8"]
