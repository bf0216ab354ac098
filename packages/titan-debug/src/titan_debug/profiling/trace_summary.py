"""Summarises a trace: where the time of a step went, and which operators took it.

**The window** extends from the start of the first step in the trace (``ProfilerStep#N``) to the end of the last. A GPU runs
behind the CPU, so in a trace with GPU events a step starts when the CPU has started it and the GPU has finished all earlier
work, and ends when both have finished it. Without marked steps, the window is the whole trace.

**Shares** are relative to the window's wall time. They are lengths of unions: a time counts once, no matter how many nested
or concurrent events cover it.

* With GPU events, a time is *communication* while any stream runs a kernel of NCCL or of torch's symmetric memory, and
  *compute* while any stream runs another kernel, a copy or a memset.
* Without GPU events, a time is *communication* while any thread is in an operator of ``c10d`` or ``_c10d_functional``
  (including ``wait_tensor``), in ``record_param_comms``, or in a backend's collective (``gloo:all_reduce``). It is
  *compute* while any thread is in another operator (``aten::mm``, any ``namespace::name``) or a compiled graph, but not in
  communication nested in it. Autograd's own work between operators is neither.
* *Overlap* is both at once; *exposed* is communication without compute; *idle* is neither: Python code, waiting for data,
  or a GPU that waits for the CPU. So compute + exposed + idle = wall time.

**Operators** are ranked by self time, which is an event's duration without nested events on the same thread. Self times of
several threads add up and may exceed the wall time. Kernels are ranked by duration. An event counts if it starts in the
window.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from titan_debug.profiling.traces import Intervals, TraceEvents

_STEP = re.compile(r"ProfilerStep#(\d+)")
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_BACKEND = r"(gloo|nccl|mpi|ucc|xccl):"
_COMMUNICATION = re.compile(rf"{_BACKEND}|c10d::|_?c10d_functional(_autograd)?::|_dtensor::|record_param_comms")
_COMPILED = "## Call CompiledFxGraph "
_COMPUTE = re.compile(rf"(?!autograd::|torch::autograd::)\w+::|{_COMPILED}")
_ANNOTATED = re.compile(rf"{_BACKEND}|{_COMPILED}")
"""Operators in the category of user annotations."""
_KERNEL_OF_COMMUNICATION = re.compile(r"nccl|nvshmem|multimem_|(one|two)_shot_", re.IGNORECASE)
_Mask = NDArray[numpy.bool_]


@dataclass(frozen=True)
class OperatorTime:
    """The total of all calls of one operator or kernel in the window."""

    name: str
    kind: str
    """``compute``, ``communication`` or ``other``."""
    calls: int
    self_ms: float
    share: float
    """Share of the total time of all operators (or kernels)."""


@dataclass(frozen=True)
class TraceSummary:
    """The summary of one rank's trace. Times are milliseconds over the whole window; see the module's docstring."""

    path: Path
    rank: int
    world_size: int
    steps: list[int]
    """Numbers of the steps in the trace; empty if none is marked."""
    gpu: bool
    """Whether compute and communication refer to GPU streams; otherwise they refer to operators on CPU threads."""
    wall_ms: float
    compute_ms: float
    communication_ms: float
    overlap_ms: float
    idle_ms: float
    operators: list[OperatorTime]
    """All operators, sorted by decreasing self time."""
    kernels: list[OperatorTime]
    """All GPU kernels, sorted by decreasing duration."""

    @property
    def exposed_ms(self) -> float:
        """Time of communication that does not overlap with compute."""
        return self.communication_ms - self.overlap_ms

    @property
    def busy_ms(self) -> float:
        """Time per step outside exposed communication. Other ranks wait for the rank with the longest."""
        return (self.wall_ms - self.exposed_ms) / max(len(self.steps), 1)

    def share(self, ms: float) -> float:
        """Return ``ms`` as a share of the wall time."""
        return ms / self.wall_ms if self.wall_ms else 0.0


def summarise(events: TraceEvents) -> TraceSummary:
    """Summarise ``events``."""
    gpu = bool(events.in_category(*_GPU).any())
    steps, (start, end) = _window(events, gpu)
    window = numpy.array([[start, end]])
    compute, communication = _on_gpu(events) if gpu else _on_threads(events)
    compute, communication = intersection(compute, window), intersection(communication, window)
    busy = length(union(compute, communication))
    inside = (events.start >= start) & (events.start < end)
    operators = inside & _operators(events)
    kernels = inside & events.in_category(*_GPU)
    return TraceSummary(
        path=events.path,
        rank=events.rank,
        world_size=events.world_size,
        steps=steps,
        gpu=gpu,
        wall_ms=(end - start) / 1e3,
        compute_ms=length(compute) / 1e3,
        communication_ms=length(communication) / 1e3,
        overlap_ms=length(intersection(compute, communication)) / 1e3,
        idle_ms=max(0.0, end - start - busy) / 1e3,
        operators=_ranked(events, operators, self_times(events, operators), _kind_of_operator),
        kernels=_ranked(events, kernels, events.duration[kernels], _kind_of_kernel),
    )


def slowest(summaries: list[TraceSummary]) -> TraceSummary:
    """Return the rank with the most time outside exposed communication; the other ranks wait for it."""
    return max(summaries, key=lambda summary: summary.busy_ms)


def most_waiting(summaries: list[TraceSummary]) -> TraceSummary:
    """Return the rank with the largest share of exposed communication."""
    return max(summaries, key=lambda summary: summary.share(summary.exposed_ms))


def _window(events: TraceEvents, gpu: bool) -> tuple[list[int], tuple[float, float]]:
    """Return the steps of the trace, and the window's start and end."""
    named = events.named(lambda name: _STEP.fullmatch(name) is not None)
    marks = events.in_category("user_annotation") & named
    ends = events.start + events.duration
    if not marks.any():
        shown = events.in_category(*_GPU) | _operators(events)
        shown = shown if shown.any() else numpy.ones_like(shown)
        return [], (float(events.start[shown].min()), float(ends[shown].max()))
    steps = sorted({int(events.names[index].partition("#")[2]) for index in events.name[marks]})
    start, end = float(events.start[marks].min()), float(ends[marks].max())
    if gpu:
        on_gpu = events.in_category(*_GPU)
        # The profiler also marks the GPU work that a step launched.
        gpu_marks = events.in_category("gpu_user_annotation") & named
        if gpu_marks.any():
            first = float(events.start[gpu_marks].min())
            before = on_gpu & (events.start < first)
            if before.any():
                start = max(start, min(first, float(ends[before].max())))
        end = max(end, float(ends[on_gpu].max()))
    return steps, (start, end)


def _on_gpu(events: TraceEvents) -> tuple[Intervals, Intervals]:
    """Return when GPU streams compute, and when they communicate."""
    on_gpu = events.in_category(*_GPU)
    communicates = on_gpu & events.named(lambda name: _kind_of_kernel(name) == "communication")
    return union(events.intervals(on_gpu & ~communicates)), union(events.intervals(communicates))


def _on_threads(events: TraceEvents) -> tuple[Intervals, Intervals]:
    """Return when CPU threads compute, and when they communicate."""
    operators = _operators(events)
    communicates = operators & events.named(lambda name: _kind_of_operator(name) == "communication")
    computes = operators & events.named(lambda name: _kind_of_operator(name) == "compute")
    compute = numpy.empty((0, 2))
    for lane in numpy.unique(events.lane[computes]):
        here = events.lane == lane
        # Communication nested in a DTensor operator is not compute, unless another thread computes meanwhile.
        compute = union(compute, difference(events.intervals(computes & here), events.intervals(communicates & here)))
    return compute, union(events.intervals(communicates))


def _operators(events: TraceEvents) -> NDArray[numpy.bool_]:
    """Return a mask of the operators on CPU threads."""
    annotated = events.in_category("user_annotation") & events.named(lambda name: _ANNOTATED.match(name) is not None)
    return events.in_category("cpu_op") | annotated


def self_times(events: TraceEvents, which: NDArray[numpy.bool_]) -> NDArray[numpy.float64]:
    """Return the self time in microseconds of each event selected by ``which``, in order: its duration without selected
    events nested in it on the same lane."""
    chosen = numpy.flatnonzero(which)
    start, duration, lane = events.start[chosen], events.duration[chosen], events.lane[chosen]
    alone = duration.copy()
    order = numpy.lexsort((-duration, start, lane))  # among events with the same start, the outer one first
    around: list[tuple[int, float, int]] = []  # enclosing events: (lane, end, index)
    for place, at, begun, lasts in zip(
        order.tolist(), lane[order].tolist(), start[order].tolist(), duration[order].tolist(), strict=True
    ):
        while around and (around[-1][0] != at or around[-1][1] <= begun):
            around.pop()
        if around:
            # Because of rounding, an event may end slightly after the enclosing one.
            alone[around[-1][2]] -= min(lasts, around[-1][1] - begun)
        around.append((at, begun + lasts, place))
    return alone


def _ranked(
    events: TraceEvents, which: NDArray[numpy.bool_], times: NDArray[numpy.float64], kind: Callable[[str], str]
) -> list[OperatorTime]:
    """Sum up the events selected by ``which`` by name, the longest first. ``times`` are their times in microseconds."""
    names, size = events.name[which], len(events.names)
    calls, totals = numpy.bincount(names, minlength=size), numpy.bincount(names, weights=times, minlength=size)
    whole = float(totals.sum()) or 1.0
    ranked = []
    for index in numpy.argsort(-totals, kind="stable"):
        if calls[index]:
            name, total = events.names[index], float(totals[index])
            ranked.append(OperatorTime(name, kind(name), int(calls[index]), total / 1e3, total / whole))
    return ranked


def _kind_of_operator(name: str) -> str:
    if _COMMUNICATION.match(name):
        return "communication"
    return "compute" if _COMPUTE.match(name) else "other"


def _kind_of_kernel(name: str) -> str:
    return "communication" if _KERNEL_OF_COMMUNICATION.search(name) else "compute"


def union(one: Intervals, other: Intervals | None = None) -> Intervals:
    """Return the union of ``one`` and ``other`` as sorted, disjoint intervals."""
    return _select(one, _none() if other is None else other, numpy.logical_or)


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of ``one`` and ``other`` as sorted, disjoint intervals."""
    return _select(one, other, numpy.logical_and)


def difference(one: Intervals, other: Intervals) -> Intervals:
    """Return ``one`` without ``other`` as sorted, disjoint intervals."""
    return _select(one, other, lambda in_one, in_other: in_one & ~in_other)


def length(intervals: Intervals) -> float:
    """Return the total length of the union."""
    merged = union(intervals)
    return float((merged[:, 1] - merged[:, 0]).sum())


def _select(one: Intervals, other: Intervals, keep: Callable[[_Mask, _Mask], _Mask]) -> Intervals:
    """Select pieces by their membership in ``one`` and ``other``. A piece lies between two neighbouring edges of all
    intervals, so membership is constant within it."""
    edges = numpy.unique(numpy.concatenate([one.ravel(), other.ravel()]))
    kept = keep(_covered(one, edges[:-1]), _covered(other, edges[:-1]))
    # The start and end of each run of selected pieces.
    changes = numpy.diff(kept, prepend=False, append=False)
    return edges[numpy.flatnonzero(changes)].reshape(-1, 2)


def _covered(intervals: Intervals, at: NDArray[numpy.float64]) -> _Mask:
    """Return whether each time lies in an interval: more intervals have begun by then than have ended. Intervals may
    overlap."""
    begun = numpy.searchsorted(numpy.sort(intervals[:, 0]), at, side="right")
    ended = numpy.searchsorted(numpy.sort(intervals[:, 1]), at, side="right")
    return begun > ended


def _none() -> Intervals:
    return numpy.empty((0, 2))
