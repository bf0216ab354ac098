"""Writes a machine as TOML, with what was measured as comments. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import tomli_w

from titan_core.toolkit.atomic_write import atomic_write
from titan_simulate.calibrate.fit import known_machine, machine_values
from titan_simulate.calibrate.result import Calibration, CollectivePoint, MatmulPoint, Measured
from titan_simulate.hardware.machine import Machine
from titan_simulate.hardware.read import read_machine

NOISY = 0.25
"""Spread from which on a figure is reported as noisy."""


def toml_of(found: Calibration, command: str, now: datetime) -> str:
    """Return the file of the machine. Comments name the device, the versions, the date, the command and the measurements.

    Raises:
        UserError: a figure is impossible.
    """
    values = machine_values(found)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    comments = [
        f"Measured by `{command}` on {now:%Y-%m-%d %H:%M} UTC",
        f"Device: {found.device}; {found.ranks} rank(s) measured together, with {found.threads} host thread(s) each",
        f"Versions: {versions}",
        *unmeasured(found),
        "",
        *(
            f"{what}: {figure}" + (f", spread {spread:.0%}" if spread is not None else "")
            for what, figure, spread in rows(found)
        ),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in comments) + "\n" + tomli_w.dumps(values)


def unmeasured(found: Calibration) -> Iterator[str]:
    """Yield what the file contains that was not measured."""
    known = known_machine(found.device)
    if known is not None:
        yield f"Not measured: peak rates and the data sheet's bandwidth, which are those of {known[0]}"
    if not found.node:
        yield f"Not measured: links within a node, which are those of {known[0] if known else 'another machine'}"
    if not found.network:
        yield f"Not measured: links across nodes, which are {f'those of {known[0]}' if known else 'as within a node'}"


def rows(found: Calibration) -> Iterator[tuple[str, str, float | None]]:
    """Yield each measurement: what, figure, spread."""
    compute = found.compute
    for kind, points in compute.matmuls.items():
        for point in points:
            yield _matmul(kind, point)
    fresh = compute.fresh
    figures = (
        *(figure for point in compute.attention for figure in (point.forward, point.backward)), compute.bandwidth,
        compute.mix, compute.pointwise, fresh.rate if fresh is not None else None, compute.kernel,
        compute.operator, compute.copy, compute.host_bandwidth,
    )  # fmt: skip
    for figure in figures:
        if figure is not None:
            yield _figure(figure)
    for where, points_of_link in (("node", found.node), ("network", found.network)):
        for one in points_of_link:
            yield _collective(where, one)


def noisy(found: Calibration) -> list[str]:
    """Return what varied so much between rounds that it should be measured again."""
    return [what for what, _, spread in rows(found) if spread is not None and spread > NOISY]


def write_machine(text: str, path: Path) -> Machine:
    """Write ``text`` to ``path`` once the reader accepts it, and return the machine that it reads.

    Raises:
        UserError: the reader does not accept it.
        OSError: the file cannot be written.
    """
    with atomic_write(path.absolute()) as part:
        part.write_text(text, encoding="utf-8")
        return read_machine(str(part))


def _matmul(kind: str, point: MatmulPoint) -> tuple[str, str, float]:
    return f"matmul {kind} {point.m} x {point.n} x {point.k}", f"{point.tflops:.4g} TFLOP/s", point.spread


def _figure(figure: Measured) -> tuple[str, str, float]:
    return figure.what, f"{figure.value:.4g} {figure.unit}", figure.spread


def _collective(where: str, point: CollectivePoint) -> tuple[str, str, float]:
    what = f"{point.kind.replace('_', '-')} of {size_of(point.bytes)} over {point.ranks} ranks, {where}"
    return what, f"{point.seconds * 1e6:.4g} µs, {point.bus_bytes / point.seconds / 1e9:.4g} GB/s", point.spread


def size_of(size: int) -> str:
    """Return ``size`` bytes in words."""
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
