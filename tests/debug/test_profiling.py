"""When and where traces and memory snapshots are written, and that they do not affect training."""

from __future__ import annotations

import gzip
import json
import logging
import os
import pickle
import re
import signal
import timeit
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.contexts import job_context
from titan_core.api import Run, StepReport, UserError, hookimpl
from titan_debug.config import ProfilingSection
from titan_debug.profiling.memory_snapshots import MemorySnapshots, ran_out_of_memory
from titan_debug.profiling.profiler import Profiler
from titan_debug.torch_private import CudaMemoryHistory
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, make_job, run_recipe

RUN: dict[str, object] = {**TINY, "training.steps": 6, "job.device": "cpu", "profiling.profiler_warmup": 1}
ON = {**RUN, "profiling.enable_profiling": "true"}
TRACES = "outputs/tiny/debug/traces"


class AtEndOf:
    """Calls a function at the end of a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        if report.step == self.step:
            self.action()


def send_signal() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def fail() -> None:
    raise RuntimeError("on purpose")


def traces(folder: Path) -> dict[str, dict[str, Any]]:
    """Return every trace in the folder of traces, after checks of the fields that Perfetto needs."""
    found = {}
    for file in sorted(path for path in (folder / TRACES).rglob("*") if path.is_file()):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        for event in trace["traceEvents"]:
            assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
            assert event["ph"] != "X" or event["dur"] >= 0
        assert any(event["name"].startswith("aten::") and event["ph"] == "X" for event in trace["traceEvents"])
        found[str(file.relative_to(folder / TRACES))] = trace
    return found


def marked(trace: dict[str, Any]) -> list[str]:
    """Return the numbers of the steps marked in a trace."""
    names = (event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    return [name.removeprefix("ProfilerStep#") for name in names if name.startswith("ProfilerStep#")]


@pytest.mark.full
def test_periodic_traces_do_not_change_the_losses(in_tmp: Path) -> None:
    plain = run_recipe("tiny", RUN)
    assert traces(in_tmp) == {}
    profiled = run_recipe("tiny", {**ON, "profiling.profile_freq": 3})
    assert profiled.losses == plain.losses
    assert profiled.grad_norms == plain.grad_norms
    found = traces(in_tmp)
    assert {name: marked(trace) for name, trace in found.items()} == {
        "step-3/rank-0.json.gz": ["3"],
        "step-6/rank-0.json.gz": ["6"],
    }
    shapes = [event["args"].get("Input Dims") for event in found["step-3/rank-0.json.gz"]["traceEvents"] if "args" in event]
    assert [[64, 32], [32, 32]] in shapes
    events = [json.loads(line) for line in (in_tmp / "outputs/tiny/events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["message"]) for event in events if event.get("kind") == "trace"] == [
        (step, f"{TRACES}/step-{step}/rank-0.json.gz") for step in (3, 6)
    ]


@pytest.mark.full
def test_a_trace_of_several_steps_in_another_folder(in_tmp: Path) -> None:
    more = {"profiling.profile_freq": 4, "profiling.profiler_active": 2, "profiling.save_traces_folder": "debug/traces/mine"}
    run_recipe("tiny", {**ON, **more, "profiling.with_stack": "true", "profiling.record_shapes": "false"})
    ((name, trace),) = traces(in_tmp).items()
    assert (name, marked(trace)) == ("mine/step-4/rank-0.json.gz", ["3", "4"])
    assert any(event.get("cat") == "python_function" for event in trace["traceEvents"])
    assert not any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])


@pytest.mark.parametrize("former", [signal.SIG_IGN, lambda number, frame: None], ids=["ignored", "own"])
def test_a_signal_requests_a_trace(in_tmp: Path, caplog: pytest.LogCaptureFixture, former: Any) -> None:
    before = signal.signal(signal.SIGUSR2, former)
    try:
        with caplog.at_level(logging.INFO, "titan_debug"):
            run_recipe("tiny", RUN, observers=[AtEndOf(2, send_signal)])
        assert signal.getsignal(signal.SIGUSR2) is former
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert {name: marked(trace) for name, trace in traces(in_tmp).items()} == {"step-4/rank-0.json.gz": ["4"]}
    assert f"wrote trace {TRACES}/step-4/rank-0.json.gz" in caplog.messages


@pytest.mark.full
def test_a_signal_during_a_trace_waits_for_it(in_tmp: Path) -> None:
    # The signal arrives during the warmup of the regular trace of steps 3 and 4. The requested trace of steps 6 and 7
    # then replaces the regular one of steps 7 and 8.
    more = {"training.steps": 12, "profiling.profile_freq": 4, "profiling.profiler_active": 2}
    run_recipe("tiny", {**ON, **more}, observers=[AtEndOf(2, send_signal)])
    assert {name: marked(trace) for name, trace in traces(in_tmp).items()} == {
        "step-4/rank-0.json.gz": ["3", "4"],
        "step-7/rank-0.json.gz": ["6", "7"],
        "step-12/rank-0.json.gz": ["11", "12"],
    }


@pytest.mark.full
def test_an_exception_writes_the_trace_in_progress(in_tmp: Path) -> None:
    more = {"profiling.profile_freq": 6, "profiling.profiler_active": 5}
    with pytest.raises(RuntimeError, match="on purpose"):
        run_recipe("tiny", {**ON, **more}, observers=[AtEndOf(3, fail)])
    assert not torch.autograd._profiler_enabled()
    assert {name: marked(trace) for name, trace in traces(in_tmp).items()} == {"step-3/rank-0.json.gz": ["2", "3"]}


@pytest.mark.full
def test_the_end_of_the_run_writes_the_trace_in_progress(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "titan_debug"):
        run_recipe("tiny", {**RUN, "profiling.profiler_active": 9}, observers=[AtEndOf(4, send_signal)])
        assert {name: marked(trace) for name, trace in traces(in_tmp).items()} == {"step-6/rank-0.json.gz": ["6"]}
        run_recipe("tiny", {**RUN, "profiling.profiler_warmup": 9}, observers=[AtEndOf(4, send_signal)])
    assert traces(in_tmp) == {}  # the new run has moved the files of the old one away
    assert not torch.autograd._profiler_enabled()
    assert "no trace was written: the run ended during its warmup" in caplog.messages


@pytest.mark.full
def test_a_trace_that_cannot_be_written_does_not_stop_the_run(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_the_way = {"profiling.profile_freq": 3, "profiling.save_traces_folder": "config.toml"}
    assert len(run_recipe("tiny", {**ON, **in_the_way}).losses) == 6
    assert re.search(r"cannot write trace \S+config\.toml/step-3/rank-0\.json\.gz: Not a directory", caplog.text)


def _ranks_job(folder: str) -> None:
    os.chdir(folder)
    overrides = {**ON, "profiling.profile_freq": 4, "profiling.ranks": "[1]", "training.local_batch_size": 1}
    run_recipe("tiny", overrides, observers=[AtEndOf(1, send_signal)] if os.environ["RANK"] == "0" else [])


@pytest.mark.full
def test_selected_ranks_write_traces_and_any_rank_accepts_the_signal(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(2, _ranks_job, str(tmp_path))
    found = traces(tmp_path)
    assert {name: marked(trace) for name, trace in found.items()} == {
        "step-3/rank-0.json.gz": ["3"],
        "step-4/rank-1.json.gz": ["4"],
    }
    for name, trace in found.items():
        about = trace["distributedInfo"]
        assert (f"rank-{about['rank']}.json.gz", about["world_size"]) == (name.partition("/")[2], 2)


def test_a_step_without_a_trace_costs_almost_nothing() -> None:
    profiler = Profiler(job_context(ProfilingSection()))
    report: Any = object()

    def step() -> None:
        profiler.titan_step_start(7)
        profiler.titan_step_end(report)

    assert min(timeit.repeat(step, number=20_000, repeat=20)) / 20_000 < 2e-6


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (3, r"rank 3 does not exist: this job has 1 rank\(s\), numbered from 0; list existing ranks"),
        (-1, r"profiling\.ranks\[1\] = -1: must be at least 0"),
    ],
)
def test_a_rank_that_the_job_does_not_have(in_tmp: Path, rank: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_recipe("tiny", {**RUN, "profiling.ranks": f"[0, {rank}]"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"profiling.ranks": "[]", "profiling.enable_profiling": "true"}, "no rank would write anything; list some ranks"),
        (
            {"profiling.profile_freq": 3, "profiling.enable_profiling": "true"},
            "profile_freq = 3: is too small: a trace takes 4 steps (3 of warmup, 1 recorded); set it to at least 4",
        ),
        (
            {"profiling.enable_memory_snapshot": "true", "job.device": "cpu"},
            'enable_memory_snapshot = true: records GPU allocations, but job.device is "cpu"; set it to false',
        ),
    ],
)
def test_mistakes_are_reported_before_anything_is_built(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_job("tiny", overrides)
    assert message in str(caught.value)


class FakeHistory(CudaMemoryHistory):
    """Replaces CUDA's memory history."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, max_events: int) -> None:
        self.calls.append("start")

    def write(self, file: Path) -> None:
        self.calls.append("write")
        file.write_bytes(pickle.dumps({"segments": []}))

    def stop(self) -> None:
        self.calls.append("stop")


class SnapshotsAsOnCuda(MemorySnapshots):
    """Memory snapshots of a run that appears to be on a GPU."""

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        super().titan_train_start(replace(run, world=replace(run.world, device=torch.device("cuda"))))


def snapshots(folder: Path) -> list[str]:
    memory = folder / "outputs/tiny/debug/memory"
    return sorted(str(file.relative_to(memory)) for file in memory.rglob("*") if file.is_file())


def test_periodic_memory_snapshots(in_tmp: Path) -> None:
    history = FakeHistory()
    section = ProfilingSection(enable_memory_snapshot=True, profile_freq=2, ranks=[0])
    run_recipe("tiny", {**RUN, "training.steps": 5}, observers=[SnapshotsAsOnCuda(job_context(section), history)])
    assert snapshots(in_tmp) == ["step-2/rank-0.pickle", "step-4/rank-0.pickle"]
    assert history.calls == ["start", "write", "write", "stop"]
    found = [json.loads(line) for line in (in_tmp / "outputs/tiny/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in found if event.get("kind") == "memory snapshot"] == [2, 4]
    other = FakeHistory()
    run_recipe("tiny", RUN, observers=[SnapshotsAsOnCuda(job_context(section.model_copy(update={"ranks": [1]})), other)])
    assert other.calls == []


@pytest.mark.parametrize("chained", [False, True])
def test_a_memory_snapshot_when_memory_runs_out(in_tmp: Path, chained: bool) -> None:
    def run_out() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. On purpose")
        except torch.OutOfMemoryError as error:
            if chained:
                raise RuntimeError("the step failed") from error
            raise

    history = FakeHistory()
    observers = [SnapshotsAsOnCuda(job_context(ProfilingSection(enable_memory_snapshot=True)), history), AtEndOf(3, run_out)]
    with pytest.raises(RuntimeError):
        run_recipe("tiny", RUN, observers=observers)
    assert snapshots(in_tmp) == ["step-3-out-of-memory/rank-0.pickle"]
    assert history.calls == ["start", "write", "stop"]


def test_errors_that_count_as_out_of_memory() -> None:
    during = RuntimeError("while that was handled")
    during.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert ran_out_of_memory(during)
    circle = ValueError("one")
    circle.__cause__ = RuntimeError("other")
    circle.__cause__.__context__ = circle
    assert not ran_out_of_memory(circle)


def test_memory_snapshots_without_a_gpu_log_a_warning(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_recipe("tiny", {**RUN, "job.device": "auto", "profiling.enable_memory_snapshot": "true"})
    assert "this job trains on CPU" in caplog.text
    assert snapshots(in_tmp) == []


@pytest.mark.gpu
def test_on_a_gpu(cuda: torch.device, in_tmp: Path) -> None:
    more = {"job.device": "cuda", "profiling.enable_memory_snapshot": "true", "profiling.profile_freq": 3}
    run_recipe("tiny", {**ON, **more})
    assert snapshots(in_tmp) == ["step-3/rank-0.pickle", "step-6/rank-0.pickle"]
    snapshot = pickle.loads((in_tmp / "outputs/tiny/debug/memory/step-3/rank-0.pickle").read_bytes())
    assert any(entry["action"] == "alloc" for device_trace in snapshot["device_traces"] for entry in device_trace)
    trace = traces(in_tmp)["step-3/rank-0.json.gz"]
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    with pytest.raises(torch.OutOfMemoryError):
        run_recipe("tiny", {**RUN, **more}, observers=[AtEndOf(2, lambda: torch.empty(2**50, device="cuda"))])
    assert snapshots(in_tmp) == ["step-2-out-of-memory/rank-0.pickle"]
