"""Times of a step's operators on a CPU, where the host is the device. Free of torch.

The host computes one operator after the other, whatever streams a GPU would use. Only collectives that are waited for later
run beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from titan_simulate.estimate.roofline import moving_seconds, seconds_of
from titan_simulate.estimate.work import Interval, Kind, Work
from titan_simulate.hardware.machine import Machine

_FUNCTIONS = ("silu", "gelu", "sigmoid", "tanh", "exp", "softmax", "logsumexp", "erf")
"""Words in the names of operators that compute an exponential function for each element."""
_ELEMENT = 4
"""Bytes of an element: CPUs train in fp32."""


def run_on_host(trace: Sequence[Work], machine: Machine) -> tuple[list[Interval], dict[Kind, float]]:
    """Return when each operator of ``trace`` runs on a ``machine`` whose host computes, and seconds by kind."""
    intervals: list[Interval] = []
    kinds: dict[Kind, float] = defaultdict(float)
    known: set[int] = set()
    host = 0.0
    beside: dict[str, float] = defaultdict(float)
    for work in trace:
        if work.kind is not Kind.WAIT:
            host += machine.host.operator_us * 1e-6
        duration = seconds_on_host(work, machine) + _fresh_seconds(work, known, machine)
        kinds[work.kind] += duration
        if work.kind is Kind.COLLECTIVE and not work.name.startswith("c10d::"):  # a functional collective
            start = max(host, beside[work.group])
            beside[work.group] = start + duration
        else:
            waited = [intervals[one].end for one in work.after if trace[one].kind is Kind.COLLECTIVE]
            start = max([host, *waited])
            host = start + duration
        intervals.append(Interval(start, start + duration))
    return intervals, dict(kinds)


def seconds_on_host(work: Work, machine: Machine) -> float:
    """Return the duration of ``work`` on a CPU."""
    if work.kind is Kind.POINTWISE:
        if work.phase == "optimizer":
            return work.traffic / (machine.host.optimizer_gb_s * 1e9)
        seconds = moving_seconds(work.traffic, machine)
        rate = machine.memory.functions_g_s
        if rate is not None and any(word in work.name for word in _FUNCTIONS):
            elements = max((one.bytes for one in (*work.reads, *work.writes)), default=0) / _ELEMENT
            seconds = max(seconds, elements / (rate * 1e9))
        return seconds
    if work.kind is Kind.ATTENTION:
        return seconds_of(work, machine) * (1.0 + machine.attention.half_positions / max(1.0, _positions(work)))
    return max(0.0, seconds_of(work, machine) - work.hidden_seconds)


def _positions(work: Work) -> float:
    """Return the length of the sequences of causal attention: its operations grow with the square, its tensors do not."""
    forward = work.flops / (2.5 if "backward" in work.name else 1.0)
    largest = max((one.bytes for one in (*work.reads, *work.writes)), default=0) / _ELEMENT
    return forward / 2 / largest if largest else 1.0


def _fresh_seconds(work: Work, known: set[int], machine: Machine) -> float:
    """Return the time in which the system clears the memory of new results. Adds the storages of ``work`` to ``known``."""
    known.update(one.storage for one in work.reads)
    made = [one for one in work.writes if one.storage not in known]
    known.update(one.storage for one in made)
    least, rate = machine.memory.fresh_mib, machine.memory.fresh_gb_s
    if least is None or rate is None:
        return 0.0
    return sum(one.bytes for one in made if one.bytes >= least * 2**20) / (rate * 1e9)
