"""What a trace says: where the time of a step went, and which operators took it.

**The window.** From the start of the first step that the trace holds (``ProfilerStep#N``) to the end of the last one. A GPU
works behind the CPU, so in a trace with GPU events a step begins when the CPU has begun it and the GPU is done with what
came before, and ends when both are done with it. A trace without marked steps is summed up whole.

**Shares** are of the window's wall time. They are lengths of unions: however many events run at a moment, in each other or
on several threads or streams, it counts once.

* With GPU events: a moment is *communication* while any stream runs a kernel of NCCL (or one of torch's symmetric memory),
  *compute* while any stream runs another kernel, a copy or a memset.
* Without: a moment is *communication* while any thread is in an operator of ``c10d`` or ``_c10d_functional`` (waiting in
  ``wait_tensor`` is one), in ``record_param_comms``, or in a collective of a backend (``gloo:all_reduce``); *compute* while
  any thread is in another operator (``aten::mm``, anything ``namespace::name``) or in a compiled graph, and not in
  communication within it. What autograd itself does between operators is neither.
* *Overlap* is both at once; *exposed* communication is without compute; *idle* is neither: Python, waiting for data, or, on
  the GPU, for the CPU. So compute + exposed + idle = the whole.

**Operators** are ranked by self time: an event's duration without that of events within it on its thread. Times of threads
add up, and so may exceed the window's. Kernels are ranked by duration. An event counts if it begins in the window.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from titan_debug.profiling.intervals import Intervals, difference, intersection, length, union
from titan_debug.profiling.trace_events import TraceEvents

_STEP = re.compile(r"ProfilerStep#(\d+)")
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_BACKEND = r"(gloo|nccl|mpi|ucc|xccl):"
_COMMUNICATION = re.compile(rf"{_BACKEND}|c10d::|_?c10d_functional(_autograd)?::|_dtensor::|record_param_comms")
_COMPILED = "## Call CompiledFxGraph "
_COMPUTE = re.compile(rf"(?!autograd::|torch::autograd::)\w+::|{_COMPILED}")
_ANNOTATED = re.compile(rf"{_BACKEND}|{_COMPILED}")
"""Operators that the profiler files under a user's own marks."""
_KERNEL_OF_COMMUNICATION = re.compile(r"nccl|nvshmem|multimem_|(one|two)_shot_", re.IGNORECASE)


@dataclass(frozen=True)
class OperatorTime:
    """One operator or kernel, all its calls in the window together."""

    name: str
    kind: str
    """``compute``, ``communication`` or ``other``."""
    calls: int
    self_ms: float
    share: float
    """Of the time of all operators (or kernels) together."""


@dataclass(frozen=True)
class TraceSummary:
    """One rank's trace. Times are milliseconds of the whole window, shares are of it; see the module."""

    path: Path
    rank: int
    world_size: int
    steps: list[int]
    """Numbers of the steps in the trace; empty where none is marked."""
    gpu: bool
    """Whether the shares are of what GPU streams ran; else of operators on the CPU's threads."""
    wall_ms: float
    compute_ms: float
    communication_ms: float
    overlap_ms: float
    idle_ms: float
    operators: list[OperatorTime]
    """By self time, the longest first; all of them."""
    kernels: list[OperatorTime]
    """The GPU's."""

    @property
    def exposed_ms(self) -> float:
        """Communication that no compute hides."""
        return self.communication_ms - self.overlap_ms

    @property
    def busy_ms(self) -> float:
        """A step's time outside of exposed communication, for which, if it is the longest of all ranks, the others wait."""
        return (self.wall_ms - self.exposed_ms) / max(len(self.steps), 1)

    def share(self, ms: float) -> float:
        """``ms`` as a share of the window."""
        return ms / self.wall_ms if self.wall_ms else 0.0


def summarise(events: TraceEvents) -> TraceSummary:
    """What ``events`` say."""
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
    """The rank that has the most to do besides exposed communication: in it, the others wait for this one."""
    return max(summaries, key=lambda one: one.busy_ms)


def most_waiting(summaries: list[TraceSummary]) -> TraceSummary:
    """The rank with the largest share of exposed communication."""
    return max(summaries, key=lambda one: one.share(one.exposed_ms))


def _window(events: TraceEvents, gpu: bool) -> tuple[list[int], tuple[float, float]]:
    """Steps of the trace, and from when to when they are."""
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
        # The profiler marks what a step made the GPU do, too.
        its_own = events.in_category("gpu_user_annotation") & named
        if its_own.any():
            first = float(events.start[its_own].min())
            before = on_gpu & (events.start < first)
            if before.any():
                start = max(start, min(first, float(ends[before].max())))
        end = max(end, float(ends[on_gpu].max()))
    return steps, (start, end)


def _on_gpu(events: TraceEvents) -> tuple[Intervals, Intervals]:
    """When GPU streams compute, and when they communicate."""
    on_gpu = events.in_category(*_GPU)
    communicates = on_gpu & events.named(lambda name: _kind_of_kernel(name) == "communication")
    return union(events.intervals(on_gpu & ~communicates)), union(events.intervals(communicates))


def _on_threads(events: TraceEvents) -> tuple[Intervals, Intervals]:
    """When threads compute, and when they communicate."""
    operators = _operators(events)
    communicates = operators & events.named(lambda name: _kind_of_operator(name) == "communication")
    computes = operators & events.named(lambda name: _kind_of_operator(name) == "compute")
    compute = numpy.empty((0, 2))
    for lane in numpy.unique(events.lane[computes]):
        here = events.lane == lane
        # An operator of a DTensor communicates within: that is no compute, unless another thread computes.
        compute = union(compute, difference(events.intervals(computes & here), events.intervals(communicates & here)))
    return compute, union(events.intervals(communicates))


def _operators(events: TraceEvents) -> NDArray[numpy.bool_]:
    """Operators on the CPU's threads."""
    annotated = events.in_category("user_annotation") & events.named(lambda name: _ANNOTATED.match(name) is not None)
    return events.in_category("cpu_op") | annotated


def self_times(events: TraceEvents, which: NDArray[numpy.bool_]) -> NDArray[numpy.float64]:
    """Of each event of ``which``, in their order, its microseconds without those of events of ``which`` directly or
    indirectly within it on its lane."""
    chosen = numpy.flatnonzero(which)
    start, duration, lane = events.start[chosen], events.duration[chosen], events.lane[chosen]
    alone = duration.copy()
    order = numpy.lexsort((-duration, start, lane))  # of events that begin together, the outer one first
    around: list[tuple[int, float, int]] = []  # those that have not ended yet: lane, end, place
    for place, at, begun, lasts in zip(
        order.tolist(), lane[order].tolist(), start[order].tolist(), duration[order].tolist(), strict=True
    ):
        while around and (around[-1][0] != at or around[-1][1] <= begun):
            around.pop()
        if around:
            # Rounding may let it end a little after what it is in.
            alone[around[-1][2]] -= min(lasts, around[-1][1] - begun)
        around.append((at, begun + lasts, place))
    return alone


def _ranked(
    events: TraceEvents, which: NDArray[numpy.bool_], times: NDArray[numpy.float64], kind: Callable[[str], str]
) -> list[OperatorTime]:
    """The events of ``which`` by name, the longest first. ``times`` are theirs, in microseconds."""
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
