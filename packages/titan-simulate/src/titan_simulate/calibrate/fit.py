"""Turns what was measured into the figures of a machine. Free of torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from titan_core.api import UserError
from titan_simulate.calibrate.result import AttentionPoint, Calibration, CollectivePoint, Compute, MatmulPoint
from titan_simulate.hardware.machine import Machine
from titan_simulate.hardware.read import names, read_machine

DEPTHS = (0.0, *(2.0**exponent for exponent in range(11)))
"""Candidates for ``half_depth``."""


def known_machine(device: str) -> tuple[str, Machine] | None:
    """Return the machine that comes with Titan and is this device, with its short name."""
    found = ((name, read_machine(name)) for name in names())
    return next(((name, machine) for name, machine in found if machine.name == device), None)


def machine_values(found: Calibration) -> dict[str, Any]:
    """Return the values of the machine's file, as nested tables.

    Raises:
        UserError: a figure is impossible.
    """
    known = known_machine(found.device)
    compute = found.compute
    like = known[1] if known is not None else None
    values: dict[str, Any] = {
        "name": found.device,
        "memory_gib": rounded(found.memory_gib),
        "multiprocessors": found.multiprocessors,
        **({"capability": found.capability} if found.capability is not None else {}),
        "ranks_per_node": found.ranks_per_node,
        **({"context_gib": 0.0} if found.is_cpu else {}),
        "matmul": {
            kind: _matmul(points, found.is_cpu, like.matmul[kind].peak_tflops if like and kind in like.matmul else 0.0)
            for kind, points in compute.matmuls.items()
        },
        "attention": _attention(compute.attention),
        "memory": {
            **_bandwidth(compute, like.memory.bandwidth_gb_s if like is not None else 0.0),
            "kernel_us": rounded(compute.kernel.value) if compute.kernel is not None else 0.0,
            **({"functions_g_s": rounded(compute.pointwise.value)} if compute.pointwise is not None else {}),
            **({"fresh_mib": compute.fresh.least_mib, "fresh_gb_s": rounded(compute.fresh.rate.value)}
               if compute.fresh is not None else {}),
        },
        "host": {
            "operator_us": rounded(compute.operator.value),
            **({"computes": True} if found.is_cpu else {}),
            **({"copy_gb_s": rounded(compute.copy.value)} if compute.copy is not None else {}),
            "optimizer_gb_s": rounded(compute.host_bandwidth.value),
        },
        "links": _links(found, like),
    }  # fmt: skip
    if found.is_cpu:
        values["allocator"] = {"caching": False}
    _require_positive(values)
    return values


def _matmul(points: Sequence[MatmulPoint], on_cpu: bool, peak: float) -> dict[str, float]:
    """Return rate and ``half_depth``. Of GPUs, only matmuls that fill the device show them; a CPU has no tiles to fill."""
    large = [point for point in points if on_cpu or min(point.m, point.n) >= 4096]

    def rate(depth: float) -> float:
        return statistics.median(point.tflops * (point.k + depth) / point.k for point in large)

    def error(depth: float) -> float:
        return statistics.mean(abs(math.log(point.tflops * (point.k + depth) / point.k / rate(depth))) for point in large)

    depth = min(DEPTHS, key=error)
    achievable = rounded(rate(depth))
    best = max(achievable, rounded(max(point.tflops for point in points)))
    tiles = {"tile_rows": 1, "tile_columns": 1} if on_cpu else {}
    return {"peak_tflops": max(peak, best), "achievable_tflops": achievable, **tiles, "half_depth": depth}


def _attention(points: Sequence[AttentionPoint]) -> dict[str, float]:
    """Return the rates of long sequences, and ``half_positions``. A time per operation is linear in 1 / positions."""
    longest = points[-1]
    halves = []
    for way in ("forward", "backward"):
        line = [(1 / point.positions, 1 / max(getattr(point, way).value, 1e-9)) for point in points]
        intercept, slope = nonnegative_line(line)
        halves.append(slope / intercept if intercept > 0 else 0.0)
    half = statistics.mean(halves)
    slowed = longest.positions / (longest.positions + half)
    values = {"forward_tflops": longest.forward.value / slowed, "backward_tflops": longest.backward.value / slowed}
    return {key: rounded(value) for key, value in {**values, "half_positions": half}.items()}


def _bandwidth(compute: Compute, of_data_sheet: float) -> dict[str, float]:
    """Return the bandwidth, and the share of it that the operators of a block reach."""
    bandwidth = max(rounded(compute.bandwidth.value), rounded(compute.mix.value), of_data_sheet)
    return {
        "bandwidth_gb_s": bandwidth,
        "efficiency": rounded(compute.mix.value / bandwidth) if bandwidth > 0 else 0.0,
    }


def _links(found: Calibration, like: Machine | None) -> dict[str, Any]:
    """Return the links. Those that could not be measured are those of a known machine, or as within a node."""
    values: dict[str, Any] = {"multiprocessors": 0} if found.is_cpu else {}
    start = None
    if found.node:
        start, values["node"] = fit_link(found.node)
    elif like is not None:
        values["node"] = like.links.node.model_dump()
    else:
        raise UserError.one(
            "titan calibrate",
            f"one process cannot measure the links of {found.device}",
            "add --nproc-per-node N, or start it with a launcher such as torchrun",
        )
    if found.network:
        of_network, values["network"] = fit_link(found.network)
        start = of_network if start is None else start
    else:
        values["network"] = like.links.network.model_dump() if like is not None else dict(values["node"])
    if start is not None:
        values["start_us"] = rounded(start)
    return values


def fit_link(points: Sequence[CollectivePoint]) -> tuple[float, dict[str, float]]:
    """Return the µs to start a collective, and latency and bandwidth of the link.

    Small messages take the start and a latency for each hop; large ones also their bytes over the bandwidth. It is the mean
    over the kinds of collectives by time, because training uses them alike. Messages between two ranks are only
    reported: they start in another way.
    """
    collectives = [point for point in points if point.kind != "send"]
    least = min(point.bytes for point in collectives)
    small = {point.kind: point for point in collectives if point.bytes == least}
    start, latency = nonnegative_line([(float(point.hops), point.seconds * 1e6) for point in small.values()])
    rest = []
    for point in collectives:
        if point.bytes > least:
            seconds = max(point.seconds - small[point.kind].seconds, 0.2 * point.seconds)
            rest.append(seconds / point.bus_bytes)
    return start, {"bandwidth_gb_s": rounded(1 / statistics.mean(rest) / 1e9), "latency_us": rounded(latency)}


def nonnegative_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope, neither negative, of the line that is closest to ``points`` (least squares)."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    variance = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / variance if variance else 0.0
    intercept = mean_y - slope * mean_x
    if slope < 0:
        return mean_y, 0.0
    if intercept < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x in xs)
    return intercept, slope


def rounded(value: float) -> float:
    """Return ``value`` with four significant digits."""
    return float(f"{value:.4g}")


def _require_positive(values: dict[str, Any], prefix: str = "") -> None:
    may_be_zero = (
        "kernel_us",
        "half_positions",
        "latency_us",
        "start_us",
        "half_depth",
        "context_gib",
        "multiprocessors",
    )
    for key, value in values.items():
        if isinstance(value, dict):
            _require_positive(value, f"{prefix}{key}.")
        elif isinstance(value, float) and (not math.isfinite(value) or value < 0 or (value == 0 and key not in may_be_zero)):
            raise UserError.one(
                f"calibration: {prefix}{key}", f"the measurements give {value:g}", "repeat it while the machine is idle"
            )
