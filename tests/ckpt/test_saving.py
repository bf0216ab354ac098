"""A checkpoint contains the state after its step, however late it is copied and written."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.noisy import NOISY
from titan_ckpt.format.writer import Writer
from titan_ckpt.save import saving, staging
from titan_ckpt.save.staging import Staging
from titan_core.api import hookimpl
from titan_core.toolkit.json_lines import read_lines
from titan_testing import PATIENCE
from titan_testing.jobs import RunRecord, run_recipe, whole

SETTINGS: dict[str, object] = {**NOISY, "checkpoint.enable": "true", "checkpoint.interval": 2}


class Watch:
    """Records the model's tensors after each step, and when the last step has ended."""

    def __init__(self) -> None:
        self.held: list[dict[str, Tensor]] = []
        self.ended = threading.Event()

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.module, self.steps = run.parts[0].module, run.steps
        self.begun = self._now()

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self.held.append(self._now())
        if report.step == self.steps:
            self.ended.set()

    def _now(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers())}


def train(overrides: dict[str, object], watch: Watch) -> RunRecord:
    return run_recipe("tiny", {**SETTINGS, **overrides}, observers=[watch])


def require_saved(step: int, watch: Watch, record: RunRecord) -> None:
    """Require a run that resumes from the checkpoint of ``step`` to continue exactly as the original run did."""
    resumed = Watch()
    again = train({"checkpoint.load_step": step, "training.steps": 4}, resumed)
    for name, tensor in watch.held[step - 1].items():
        assert torch.equal(resumed.begun[name], tensor), name
    assert again.losses == record.losses[step:]


def test_a_late_write_saves_the_state_of_its_step(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 2 is written after all later steps have ended."""
    watch = Watch()
    original: Any = Writer.save

    def save(*arguments: Any, **keywords: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert watch.ended.wait(PATIENCE)
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "save", save)
        record = train({"checkpoint.async_mode": "async", "training.steps": 4}, watch)
    require_saved(2, watch, record)


def test_an_update_waits_for_the_copy(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is delayed until training waits for it, after the next step's backward pass. If training did not wait, the
    copy would be made after the last step."""
    watch = Watch()
    copy = Staging.copy

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not self.is_set():
                watch.ended.set()
            return super().wait(timeout)

    def late(self: Staging, *arguments: Any) -> Any:
        assert watch.ended.wait(PATIENCE)
        return copy(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "threading", SimpleNamespace(Event=Waited))
        patch.setattr(Staging, "copy", late)
        record = train({"checkpoint.async_mode": "async", "training.steps": 4}, watch)
    require_saved(2, watch, record)


class LosesAnotherRank:
    """Fails as a rank does that has lost another one, while a checkpoint is being written."""

    def __init__(self, writing: threading.Event) -> None:
        self._writing = writing

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if step == 4:
            assert self._writing.wait(PATIENCE)
            raise RuntimeError("Timed out waiting 10000ms for recv operation to complete")


def test_a_rank_that_lost_another_one_ends_although_its_background_save_waits_for_that_one(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The collectives of a background save have a timeout of half an hour. No launcher can restart the job before."""
    writing, answered, original = threading.Event(), threading.Event(), Writer.save
    threads: list[threading.Thread] = []

    def save(*arguments: Any, **keywords: Any) -> Any:
        threads.append(threading.current_thread())
        writing.set()
        assert answered.wait(PATIENCE)
        return original(*arguments, **keywords)

    monkeypatch.setattr(Writer, "save", save)
    monkeypatch.setattr(saving, "LOST_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        run_recipe("tiny", {**SETTINGS, "checkpoint.async_mode": "async"}, observers=[LosesAnotherRank(writing)])
    assert "checkpoint of step 2 is abandoned: it waits for another rank, which is lost" in caplog.text
    (thread,) = threads
    assert thread.daemon  # the process does not wait for it
    answered.set()
    thread.join(PATIENCE)
    assert not list(in_tmp.glob("outputs/*/checkpoint/step-2/checkpoint.json")), "an abandoned save was committed"


def test_staging_copies_to_memory_that_it_reuses() -> None:
    host, tensor = Staging(torch.device("cpu"), pinned=False), torch.arange(4.0)
    first = host.snapshot({"a": tensor, "count": torch.tensor(3)}).copy()
    tensor += 1
    assert first["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert first["count"].dtype == torch.int64
    second = host.snapshot({"a": tensor}).copy()
    assert second["a"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert host.snapshot({"a": tensor.double()}).copy()["a"].dtype == torch.float64
    assert host.snapshot({"a": torch.zeros(2)}).copy()["a"].shape == (2,)


def test_a_run_that_stops_early_saves_its_last_step(in_tmp: Path) -> None:
    whole_run = Watch()
    record = train({"job.dump_folder": "whole", "training.steps": 4}, whole_run)
    assert train({"training.stop_at_step": 3, "training.steps": 4}, Watch()).losses == record.losses[:3]
    require_saved(3, whole_run, record)


def test_tokens_are_counted_across_resumes_and_by_dataset(in_tmp: Path) -> None:
    corpora = "[{dataset = 'stdlib', name = 'a', weight = 3.0}, {dataset = 'stdlib', name = 'b', weight = 1.0}]"
    mixed: dict[str, object] = {"data.mixture": corpora, "training.steps": 4, "metrics.log_freq": 1}
    train({**mixed, "job.dump_folder": "whole"}, Watch())
    for stop in (2, None):
        train({**mixed, **({"training.stop_at_step": stop} if stop else {})}, Watch())

    def counts(run: str) -> list[dict[str, int]]:
        lines = read_lines(in_tmp / run / "metrics.jsonl")
        return [{key: value for key, value in line.items() if key.startswith("tokens_seen")} for line in lines]

    assert counts("outputs/tiny") == counts("whole")
    assert len(counts("whole")[0]) == 3
