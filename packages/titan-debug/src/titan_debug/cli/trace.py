"""``titan trace summary``: prints where the time of a profiled step went. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import CommandContext
from titan_core.toolkit.arguments import json_argument, small_integer
from titan_core.toolkit.text import print_json, print_table, say

if TYPE_CHECKING:
    from titan_debug.profiling.trace_summary import OperatorTime, TraceSummary

_WIDEST = 90
"""Number of characters of a name to print. Names of kernels may have thousands."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan trace summary``."""
    parser.add_argument(
        "path", metavar="PATH", help="a trace (.json or .json.gz), a folder of one step's traces, or a run's directory"
    )
    parser.add_argument(
        "--top", type=small_integer, default=10, metavar="N", help="number of operators to print (default: 10)"
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print where the time of a step went on each rank, and the operators that took the most time on the slowest rank."""
    arguments = context.arguments
    from titan_debug.profiling.trace_summary import most_waiting, slowest, summarise
    from titan_debug.profiling.traces import TraceEvents, trace_files

    # One trace at a time, to save memory.
    summaries = [summarise(TraceEvents.read(file)) for file in trace_files(Path(arguments.path))]
    slow, waiting = slowest(summaries), most_waiting(summaries)
    if arguments.json:
        print_json({
            "ranks": [_as_json(summary, arguments.top) for summary in summaries],
            "slowest_rank": slow.rank,
            "most_waiting_rank": waiting.rank,
        })  # fmt: skip
        return 0
    if len(summaries) == 1:
        _print_shares(slow)
    else:
        _print_ranks(summaries)
        exposed = waiting.share(waiting.exposed_ms)
        say(f"rank {waiting.rank} waits most: {exposed:.1%} of its step is exposed communication")
        say(f"rank {slow.rank} is the slowest: {slow.busy_ms:.1f} ms of its step are not exposed communication")
        say(f"\nrank {slow.rank}:")
    for header, operators in (("operator", slow.operators), ("kernel", slow.kernels)):
        if operators:
            print()
            _print_operators(header, operators, arguments.top)
    return 0


def _print_shares(summary: TraceSummary) -> None:
    say(summary.path)
    where = "GPU streams" if summary.gpu else "CPU threads"
    say(f"rank {summary.rank} of {summary.world_size}, {_steps(summary)}, {where}\n")
    count = max(len(summary.steps), 1)
    rows = [(name, f"{summary.share(ms):.1%}", f"{ms / count:,.2f}") for name, ms in _parts(summary)]
    period = "per step" if summary.steps else "whole trace"
    print_table((period, "share", "ms"), [*rows, ("wall time", "", f"{summary.wall_ms / count:,.2f}")])


def _print_ranks(summaries: Sequence[TraceSummary]) -> None:
    headers = ("rank", "ms per step", *(name.strip() for name, _ in _parts(summaries[0])), "trace")
    print_table(headers, [
        (str(summary.rank), f"{summary.wall_ms / max(len(summary.steps), 1):,.2f}",
         *(f"{summary.share(ms):.1%}" for _, ms in _parts(summary)), str(summary.path))
        for summary in summaries
    ])  # fmt: skip


def _print_operators(header: str, operators: Sequence[OperatorTime], top: int) -> None:
    print_table(
        ("self ms", "share", "calls", "kind", header),
        [
            (
                f"{operator.self_ms:,.2f}",
                f"{operator.share:.1%}",
                f"{operator.calls:,}",
                operator.kind,
                _short(operator.name),
            )
            for operator in operators[:top]
        ],
    )
    if len(operators) > top:
        say(f"and {len(operators) - top} more (see --top)")


def _parts(summary: TraceSummary) -> Iterator[tuple[str, float]]:
    """Yield the name and the milliseconds of each part of the wall time."""
    yield "compute", summary.compute_ms
    yield "communication", summary.communication_ms
    yield "  overlap", summary.overlap_ms
    yield "  exposed", summary.exposed_ms
    yield "idle", summary.idle_ms


def _steps(summary: TraceSummary) -> str:
    if not summary.steps:
        return "no marked steps"
    first, last = summary.steps[0], summary.steps[-1]
    return f"step {first}" if len(summary.steps) == 1 else f"steps {first} to {last}"


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}..."


def _as_json(summary: TraceSummary, top: int) -> dict[str, Any]:
    parts = {name.strip(): ms for name, ms in _parts(summary)}
    return {
        "rank": summary.rank,
        "world_size": summary.world_size,
        "path": str(summary.path),
        "steps": summary.steps,
        "gpu": summary.gpu,
        "wall_ms": summary.wall_ms,
        "ms": parts,
        "shares": {name: summary.share(ms) for name, ms in parts.items()},
        "operators": [asdict(operator) for operator in summary.operators[:top]],
        "kernels": [asdict(kernel) for kernel in summary.kernels[:top]],
    }
