"""``titan trace summary``: exact shares of handmade traces, and summaries of real ones."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, strategies as st

from titan_core.api import UserError
from titan_core.cli.main import main
from titan_debug.profiling.trace_summary import TraceSummary, difference, intersection, length, summarise, union
from titan_debug.profiling.traces import TraceEvents, trace_files
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_recipe

RUN: dict[str, object] = {
    **TINY, "job.device": "cpu", "profiling.enable_profiling": "true", "profiling.profile_freq": 4,
    "profiling.profiler_warmup": 1, "profiling.profiler_active": 2,
}  # fmt: skip
MAIN, GLOO, OTHER = 1, 2, 3
Event = dict[str, Any]


def event(name: str, start: float, end: float, category: str = "cpu_op", tid: int | str = MAIN, pid: int = 100) -> Event:
    """An event from ``start`` to ``end``, in milliseconds."""
    times = {"ts": 1000.0 * (5000 + start), "dur": 1000.0 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": {"External id": 1}}


def step(number: int, start: float, end: float, category: str = "user_annotation", tid: int = MAIN) -> Event:
    return event(f"ProfilerStep#{number}", start, end, category, tid)


def write(file: Path, events: Iterable[Event], **more: Any) -> Path:
    """Write a trace of ``events`` and some events without a duration."""
    file.parent.mkdir(parents=True, exist_ok=True)
    others = [
        {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 100, "tid": MAIN, "ts": 1.0},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e9},
    ]
    text = json.dumps({"schemaVersion": 1, **more, "traceEvents": [*others, *events]})
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def summary(file: Path) -> TraceSummary:
    return summarise(TraceEvents.read(file))


def parts(one: TraceSummary) -> tuple[float, ...]:
    """Return the milliseconds of wall time, compute, communication, overlap and idle time."""
    return tuple(round(ms, 6) for ms in (one.wall_ms, one.compute_ms, one.communication_ms, one.overlap_ms, one.idle_ms))


def on_threads() -> list[Event]:
    """A step of 100 ms that computes in [0, 40), [50, 60) and [62, 70), and communicates in [35, 55)."""
    return [
        step(7, 0, 100),
        event("aten::mm", 0, 30),
        event("aten::sub", 10, 20),  # nested
        event("aten::linear", 30, 60),  # a DTensor operator, which contains a wait
        event("_c10d_functional::wait_tensor", 40, 50),
        event("gloo:all_reduce", 35, 55, "user_annotation", GLOO),
        event("aten::add_", 36, 40, tid=GLOO),  # nested in the collective
        event("aten::copy_", 52, 58, tid=OTHER),
        event("autograd::engine::evaluate_function: MmBackward0", 60, 80),
        event("MmBackward0", 60, 75),
        event("aten::mm", 62, 70),
        event("FSDP::post_backward", 60, 95, "user_annotation"),  # an annotation, not an operator
        event("model.py(12): forward", 0, 100, "python_function"),
        event("aten::mm", 120, 150),  # after the step
    ]


def test_shares_of_threads_count_each_time_once(tmp_path: Path) -> None:
    one = summary(write(tmp_path / "trace.json", on_threads()))
    assert (one.gpu, one.steps, one.rank, one.world_size) == (False, [7], 0, 1)
    assert parts(one) == (100, 58, 20, 10, 32)
    assert (one.exposed_ms, one.share(one.exposed_ms)) == pytest.approx((10, 0.1))


def test_operators_are_ranked_by_self_time(tmp_path: Path) -> None:
    one = summary(write(tmp_path / "trace.json", on_threads()))
    assert [(operator.name, operator.kind, operator.calls, round(operator.self_ms, 6)) for operator in one.operators] == [
        ("aten::mm", "compute", 2, 28),
        ("aten::linear", "compute", 1, 20),
        ("gloo:all_reduce", "communication", 1, 16),
        ("aten::sub", "compute", 1, 10),
        ("_c10d_functional::wait_tensor", "communication", 1, 10),
        ("MmBackward0", "other", 1, 7),
        ("aten::copy_", "compute", 1, 6),
        ("autograd::engine::evaluate_function: MmBackward0", "other", 1, 5),
        ("aten::add_", "compute", 1, 4),
    ]
    assert sum(operator.share for operator in one.operators) == pytest.approx(1)
    assert one.operators[0].share == pytest.approx(28 / 106)
    assert one.kernels == []


def test_a_compiled_graph_is_compute_except_for_its_communication(tmp_path: Path) -> None:
    events = [
        step(1, 0, 10),
        step(2, 10, 20),
        event("Torch-Compiled Region: 0/0", 0, 20),
        event("## Call CompiledFxGraph fxy ##", 2, 18, "user_annotation"),
        event("c10d::allreduce_", 4, 8),
    ]
    one = summary(write(tmp_path / "trace.json.gz", events))
    assert one.steps == [1, 2]
    assert parts(one) == (20, 12, 4, 0, 4)


def test_shares_of_gpu_streams(tmp_path: Path) -> None:
    def kernel(name: str, start: float, end: float, stream: int = 7, category: str = "kernel") -> Event:
        return event(name, start, end, category, tid=stream, pid=0)

    gemm, reduce = "ampere_sgemm_128x64_tn", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        step(9, 0, 60),
        step(9, 20, 115, "gpu_user_annotation", tid=7),
        event("aten::mm", 0, 50),  # CPU events do not affect the shares
        event("nccl:all_reduce", 50, 58, "user_annotation"),
        event("cudaLaunchKernel", 5, 6, "cuda_runtime"),
        kernel(gemm, -5, 16),  # belongs to the previous step; this step starts when it ends
        kernel(gemm, 20, 60),
        kernel(gemm, 30, 50, 8),  # concurrent, on another stream
        kernel(reduce, 55, 90, 20),
        kernel("Memcpy HtoD (Pinned -> Device)", 80, 85, 8, "gpu_memcpy"),
        kernel("void multi_tensor_apply", 100, 115),
        kernel("Memset (Device)", 114, 116, 8, "gpu_memset"),
    ]
    one = summary(write(tmp_path / "trace.json", events))
    assert (one.gpu, one.steps) == (True, [9])
    # From 16 to 116: compute in [20, 60), [80, 85) and [100, 116), communication in [55, 90).
    assert parts(one) == (100, 61, 35, 10, 14)
    assert [(operator.name, operator.kind, operator.calls, round(operator.self_ms, 6)) for operator in one.kernels[:2]] == [
        (gemm, "compute", 2, 60),
        (reduce, "communication", 1, 35),
    ]
    assert [operator.name for operator in one.operators] == ["nccl:all_reduce"]  # aten::mm starts before the window


def test_a_gpu_that_waits_for_the_cpu_is_idle(tmp_path: Path) -> None:
    events = [step(3, 0, 100), event("kernel", 40, 50, "kernel", 7, 0), event("kernel", -20, -10, "kernel", 7, 0)]
    assert parts(summary(write(tmp_path / "a.json", [*events, step(3, 40, 50, "gpu_user_annotation", 7)]))) == (
        100,
        10,
        0,
        0,
        90,
    )
    assert parts(summary(write(tmp_path / "b.json", events))) == (100, 10, 0, 0, 90)


def test_a_trace_without_marked_steps_is_summarised_as_a_whole(tmp_path: Path) -> None:
    one = summary(write(tmp_path / "trace.json", [event("aten::mm", 10, 20), event("aten::mm", 30, 50)]))
    assert (one.steps, parts(one)) == ([], (40, 30, 0, 0, 10))


small = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=8)


@given(small, small)
def test_interval_operations_match_brute_force(one: list[list[int]], other: list[list[int]]) -> None:
    def moments(intervals: Iterable[Iterable[float]]) -> set[int]:
        return {moment for start, end in intervals for moment in range(int(start), int(end))}

    a, b = (numpy.array(intervals, dtype=float).reshape(-1, 2) for intervals in (one, other))
    for found, expected in (
        (union(a), moments(one)),
        (union(a, b), moments(one) | moments(other)),
        (intersection(a, b), moments(one) & moments(other)),
        (difference(a, b), moments(one) - moments(other)),
    ):
        assert moments(found) == expected
        assert length(found) == len(expected)
        edges = found.ravel()
        assert (numpy.diff(edges) > 0).all()  # sorted, not empty, disjoint
    assert length(a) == len(moments(one))


def rank_trace(file: Path, rank: int, compute: float) -> Path:
    """Write a step of 100 ms: ``compute`` ms of compute, then communication."""
    events = [step(4, 0, 100), event("aten::mm", 0, compute), event("c10d::allreduce_", compute, 100)]
    return write(file, events, distributedInfo={"backend": "gloo", "rank": rank, "world_size": 2})


def test_several_ranks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, compute in ((0, 90.0), (1, 60.0)):
        rank_trace(tmp_path / f"rank-{rank}.json.gz", rank, compute)
    assert main(["trace", "summary", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rank 1 waits most: 40.0% of its step is exposed communication\n" in out
    assert "rank 0 is the slowest: 90.0 ms of its step are not exposed communication\n" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["0", "100.00", "90.0%", "10.0%", "0.0%", "10.0%", "0.0%", str(tmp_path / "rank-0.json.gz")] in lines
    assert ["90.00", "90.0%", "1", "compute", "aten::mm"] in lines
    assert main(["trace", "summary", str(tmp_path), "--json", "--top", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["slowest_rank"], printed["most_waiting_rank"]) == (0, 1)
    assert [summary["shares"]["exposed"] for summary in printed["ranks"]] == pytest.approx([0.1, 0.4])
    assert [[operator["name"] for operator in summary["operators"]] for summary in printed["ranks"]] == [
        ["aten::mm"],
        ["aten::mm"],
    ]


def test_the_files_for_a_path(tmp_path: Path) -> None:
    run = tmp_path / "run"
    files = [rank_trace(run / "mine" / f"step-10/rank-{rank}.json.gz", rank, 50) for rank in (0, 2, 10)]
    older = rank_trace(run / "mine/step-9/rank-0.json", 0, 50)
    (run / "mine/step-11").mkdir()  # no complete trace yet
    (run / "mine/step-11/.rank-0.json.gz.json").write_text("{")
    (run / "metrics.jsonl").touch()
    (run / "config.toml").write_text('[profiling]\nsave_traces_folder = "mine"\n')
    assert trace_files(run) == files
    assert trace_files(run / "mine") == files
    assert trace_files(run / "mine/step-9") == [older]
    assert trace_files(older) == [older]
    (run / "config.toml").write_text("")
    with pytest.raises(UserError, match=r"no traces in .*run/debug/traces; train with"):
        trace_files(run)


def bad_files() -> dict[str, bytes]:
    whole = gzip.compress(json.dumps({"traceEvents": [event("aten::mm", 0, 1)] * 1000}).encode())
    return {
        "cut.json.gz": whole[: len(whole) // 2],
        "flipped.json.gz": whole[:40] + b"\xff" * 8 + whole[48:],
        "cut.json": b'{"traceEvents": [{"ph": "X", "name": "a"',
        "list.json": b"[1, 2]",
        "other.json": b'{"weights": {}}',
        "words.json": b'{"traceEvents": "none"}',
        "times.json": b'{"traceEvents": [{"ph": "X", "name": "a", "ts": "noon", "dur": 1}]}',
        "endless.json": b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1e400, "dur": 1}]}',
        "ranks.json": b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1}], "distributedInfo": {"rank": "a"}}',
        "empty.json": b'{"traceEvents": [{"ph": "M", "name": "a"}]}',
        "nothing.json": b"",
    }


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("name", list(bad_files()))
def test_bad_files_are_reported_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(bad_files()[name])
    assert main(["trace", "summary", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"titan: error: trace '{tmp_path / name}': ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["rank-0.json", "rank-0.json.gz"])
def test_a_trace_that_is_too_long_is_not_called_damaged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.dumps({"traceEvents": [event("aten::mm", 0, 1)]}).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setattr("titan_debug.profiling.traces._LONGEST", len(content))
    assert main(["trace", "summary", str(tmp_path / name)]) == 0
    monkeypatch.setattr("titan_debug.profiling.traces._LONGEST", len(content) - 1)
    capsys.readouterr()
    assert main(["trace", "summary", str(tmp_path / name)]) == 2
    unpacked = " once it is decompressed" if name.endswith(".gz") else ""
    why = f"is longer than {len(content) - 1} bytes{unpacked}, the most that Titan reads of a trace"
    fix = "record fewer steps (profiling.profiler_active) without the stacks of Python (profiling.with_stack), or open it"
    assert capsys.readouterr().err == f"titan: error: trace '{tmp_path / name}': {why}; {fix} in ui.perfetto.dev\n"


def test_a_path_without_traces_is_reported(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", "nowhere"]) == 2
    assert "nowhere: no such file or folder; pass a trace" in capsys.readouterr().err
    assert main(["trace", "summary", "."]) == 2
    assert ".: no traces in .; train with" in capsys.readouterr().err


@pytest.mark.full
def test_a_real_trace_of_one_process(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe("tiny", RUN)
    capsys.readouterr()
    assert main(["trace", "summary", "outputs/tiny", "--top", "400", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (one["steps"], one["gpu"], one["rank"], one["world_size"]) == ([3, 4], False, 0, 1)
    assert one["ms"]["communication"] == 0
    assert 0.1 < one["shares"]["compute"] < 1
    assert one["shares"]["compute"] + one["shares"]["idle"] == pytest.approx(1)
    calls = {operator["name"]: operator["calls"] for operator in one["operators"]}
    # 2 steps of 2 microbatches: 15 matmuls forward and twice as many backward
    assert calls["aten::mm"] == 2 * 2 * 3 * 15
    # Only one thread runs at a time, so self times add up to at most the wall time.
    assert sum(operator["self_ms"] for operator in one["operators"]) <= one["wall_ms"] * 1.001


def _fsdp_job(folder: str) -> None:
    os.chdir(folder)
    run_recipe("tiny", RUN)


@pytest.mark.full
def test_real_traces_of_two_ranks_communicate(
    gloo: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gloo.run(2, _fsdp_job, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "summary", "outputs/tiny", "--json", "--top", "400"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(summary["rank"], summary["world_size"]) for summary in printed["ranks"]] == [(0, 2), (1, 2)]
    for summary in printed["ranks"]:
        shares, operators = summary["shares"], {operator["name"]: operator for operator in summary["operators"]}
        assert 0 < shares["exposed"] <= shares["communication"] < 1
        assert shares["compute"] + shares["exposed"] + shares["idle"] == pytest.approx(1)
        # In each of 2 steps FSDP gathers the weights of 2 blocks and the rest, and for backward those of the blocks again
        assert operators["gloo:all_gather"]["kind"] == "communication"
        assert operators["c10d::_allgather_base_"]["calls"] >= 2 * 5
