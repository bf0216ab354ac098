"""Where an estimate's time goes, against computations by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("titan_simulate")

from titan_simulate.cli.explain import print_explanation
from titan_simulate.engine.result import Owner, SimulatedRank, peak_of
from titan_simulate.estimate.explain import CollectiveRow, Explanation, MemoryRow, TimeRow, extended, times_of
from titan_simulate.estimate.figures import ONCE, figures_of
from titan_simulate.estimate.pipeline import Order, one_forward_one_backward
from titan_simulate.estimate.reduce import Parts
from titan_simulate.estimate.spans import EXPOSED, HOST, spans
from titan_simulate.estimate.timeline import simulate_streams
from titan_simulate.estimate.traced_rank import TracedRank
from titan_simulate.estimate.work import ACTIONS, ALL, Action, Data, Interval, Kind, Work
from titan_simulate.hardware.read import read_machine

H100 = read_machine("h100")


def work(kind: Kind, size: int = 2**26, stream: str = "main", after: tuple[int, ...] = (), **more: Any) -> Work:
    """Return an operator that takes longer the larger ``size`` is."""
    fields = {"module": "layers.0", "phase": "forward", **more}
    if kind is Kind.COLLECTIVE:
        fields |= {"ranks": (0, 1), "group": "dp", "bytes": size}
    return Work(kind, str(kind), stream=stream, after=after, reads=(Data(1, size),), **fields)


COMPUTES, GATHERS, COPIES = Kind.POINTWISE, Kind.COLLECTIVE, Kind.HOST_COPY


def seconds_by(kinds: list[Kind], times: list[tuple[float, float]], end: float) -> dict[tuple[int, str], float]:
    found: Counter[tuple[int, str]] = Counter()
    for one in spans([work(kind) for kind in kinds], [Interval(*time) for time in times], end):
        found[one.running, one.kind] += one.seconds  # type: ignore[assignment]
    return dict(found)


def test_each_instant_belongs_to_what_computes_then_to_copies_then_to_communication_then_to_the_host() -> None:
    found = seconds_by([GATHERS, COMPUTES, COPIES, COMPUTES], [(0, 6), (1, 4), (3, 5), (8, 9)], end=11)
    assert found == {
        (0, EXPOSED): 2.0,  # before the first operator computes, and after the copy
        (1, "pointwise"): 3.0,
        (2, "copy to or from the host"): 1.0,
        (3, HOST): 2.0 + 2.0,  # until it issues the last operator, and after that one
        (3, "pointwise"): 1.0,
    }


def test_what_runs_at_once_shares_the_time() -> None:
    assert seconds_by([GATHERS, GATHERS], [(0, 4), (2, 6)], end=6) == {(0, EXPOSED): 3.0, (1, EXPOSED): 3.0}


@st.composite
def traces(draw: st.DrawFn) -> list[Work]:
    found: list[Work] = []
    for position in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from([COMPUTES, GATHERS, COPIES, Kind.HOST_WAIT, Kind.WAIT]))
        after = tuple(draw(st.sets(st.integers(0, position - 1), max_size=2))) if position else ()
        found.append(work(kind, draw(st.integers(1, 2**28)), draw(st.sampled_from("abc")), after))
    return found


@given(traces())
def test_the_spans_are_the_step_and_are_counted_where_the_figures_count_them(trace: list[Work]) -> None:
    timeline = simulate_streams(trace, H100)
    found = list(spans(trace, timeline.intervals, timeline.seconds))
    assert sum(one.seconds for one in found) == pytest.approx(timeline.seconds)
    assert all(one.seconds >= 0 for one in found)
    now = 0.0
    for position, interval in enumerate(timeline.intervals):
        counted = sum(one.seconds for one in found if one.counted == position)
        assert counted == pytest.approx(max(0.0, interval.end - now), abs=1e-12)
        now = max(now, interval.end)


def test_what_further_blocks_add_to_other_modules_counts_for_the_blocks() -> None:
    few = {("layers.*.w", "matmul"): 2.0, ("head", EXPOSED): 0.5, ("-", "pointwise"): 1.0}
    more = {("layers.*.w", "matmul"): 3.0, ("head", EXPOSED): 0.7, ("-", "pointwise"): 1.1}
    found = extended(few, more, lambda one, two: one + 8 * (two - one), "layers.*")
    assert found == pytest.approx(
        {
            ("layers.*.w", "matmul"): 10.0,
            ("head", EXPOSED): 0.7,
            ("layers.*", EXPOSED): 1.4,
            ("-", "pointwise"): 1.8,
        }
    )


def test_the_times_of_a_pipeline_are_those_of_its_actions_and_of_what_happens_once() -> None:
    """On a rank with two stages of four, where the first and the last microbatch take longer than those between."""
    ran: list[Action] = [(kind, stage, number) for number in range(4) for kind in "FB" for stage in (0, 3)]
    trace = [work(COMPUTES, module="embed")]
    for kind, stage, number in ran:
        size = 2**26 * (1 + stage + 3 * (number == 0) + (kind == "B"))
        trace.append(
            work(GATHERS if number == 0 else COMPUTES, size, action=(kind, stage, number), module=f"layers.{stage}")
        )
    trace.append(work(COMPUTES, phase="optimizer", module=""))
    microbatches = 9
    on_rank = tuple((kind, stage, number) for number in range(microbatches) for kind in "FB" for stage in (0, 3))
    order = Order((on_rank, tuple(one_forward_one_backward(1, 2, microbatches))), (0, 1, 1, 0))
    found = cast("SimulatedRank", None)
    sample = TracedRank(0, trace, found, Parts([1, 1], [["layers.0"], ["layers.3"]], []), 4, order)
    figures = figures_of(sample, H100, scale=microbatches / 4, overlaps=False)
    once, stages = times_of(figures, order, last=False)
    assert sum(once.values()) == pytest.approx(figures.sections[ONCE])
    for stage, seconds in zip(figures.stages, stages, strict=True):
        assert sum(seconds.values()) == pytest.approx(microbatches * sum(stage[ALL][kind] for kind in ACTIONS))
    assert {module for module, _ in once} >= {"embed", "-"}
    assert {(module, what[1]) for module, what in stages[1]} == {("layers.*", "pointwise")}


def test_memory_belongs_to_modules_beside_those_that_allocated_it() -> None:
    peak = peak_of(
        {(Owner.PARAMETERS, "", "a"): 1, (Owner.PARAMETERS, "", "b"): 2, (Owner.ACTIVATIONS, "b", "b"): 4}, "", ""
    )
    assert (peak.bytes, peak.owners) == (7, {Owner.ACTIVATIONS: 4, Owner.PARAMETERS: 3})
    assert peak.modules == {"b": 4, "": 3}
    assert peak.belonging == {Owner.PARAMETERS: {"a": 1, "b": 2}, Owner.ACTIVATIONS: {"b": 4}}


def test_small_rows_are_shown_together(capsys: pytest.CaptureFixture[str]) -> None:
    time = [TimeRow("layers.*.w", "forward", "matmul", "", 0.6), TimeRow("layers.*", "forward", EXPOSED, "mesh_tp", 0.396)]
    time += [TimeRow("head", "backward", "pointwise", "", 0.002)] * 2
    long = "model.layers.*." + "x" * 40
    explanation = Explanation(
        rank=3,
        time=tuple(time),
        collectives=(CollectiveRow(long, "c10d::_allgather_base_", "mesh_tp", 8, 1024.0, 2.0, 0.5, 0.396),),
        memory=(MemoryRow("layers.*", "gradients", 20.0), MemoryRow("-", "allocator, idle", 4.0)),
    )
    print_explanation(cast("Any", SimpleNamespace(step_seconds=1.0, peak_gib=24.0, rank=0)), explanation)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["forward", "99.6%,", "backward", "0.4%"] in lines
    assert ["layers.*", "forward", "exposed", "mesh_tp", "396.0", "39.6%"] in lines
    assert ["2", "others", "4.0", "0.4%"] in lines and ["step", "1,000.0", "100.0%"] in lines
    assert ["-", "allocator,", "idle", "4.00", "16.7%"] in lines and ["peak", "24.00", "100.0%"] in lines
    assert [f"...{'x' * 31}", "allgather_base", "mesh_tp", "1,024", "2.00", "500.0", "396.0"] in lines
