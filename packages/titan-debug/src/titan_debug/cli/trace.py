"""``titan trace summary``. Free of torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api.command import CommandContext
from titan_core.api.tools.arguments import few, json_argument
from titan_core.api.tools.output import print_json, print_table

if TYPE_CHECKING:
    from titan_debug.profiling.trace_summary import OperatorTime, TraceSummary

_WIDEST = 90
"""Characters of a name that are shown; those of kernels may have thousands."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan trace summary``."""
    parser.add_argument(
        "path", metavar="PATH", help="a trace (.json or .json.gz), a folder of one step's traces, or a run's directory"
    )
    parser.add_argument("--top", type=few, default=10, metavar="N", help="how many operators (default: 10)")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print where the time of a step went, by rank, and the operators that took most of the slowest rank's."""
    arguments = context.arguments
    from titan_debug.profiling.trace_events import TraceEvents
    from titan_debug.profiling.trace_files import trace_files
    from titan_debug.profiling.trace_summary import most_waiting, slowest, summarise

    # One after the other, since each takes memory.
    summaries = [summarise(TraceEvents.read(file)) for file in trace_files(Path(arguments.path))]
    slow, waiting = slowest(summaries), most_waiting(summaries)
    if arguments.json:
        print_json({
            "ranks": [_as_json(one, arguments.top) for one in summaries],
            "slowest_rank": slow.rank,
            "most_waiting_rank": waiting.rank,
        })  # fmt: skip
        return 0
    if len(summaries) == 1:
        _print_shares(slow)
    else:
        _print_ranks(summaries)
        waits = f"{waiting.share(waiting.exposed_ms):.1%} of its step is communication that no compute hides"
        print(f"rank {waiting.rank} waits most: {waits}")
        print(f"rank {slow.rank} is the slowest: it is busy otherwise for {slow.busy_ms:.1f} ms a step")
        print(f"\nof rank {slow.rank}:")
    for header, all_of_them in (("operator", slow.operators), ("kernel", slow.kernels)):
        if all_of_them:
            print()
            _print_operators(header, all_of_them, arguments.top)
    return 0


def _print_shares(one: TraceSummary) -> None:
    print(one.path)
    what = "on the GPU" if one.gpu else "on the CPU's threads"
    print(f"rank {one.rank} of {one.world_size}, {_steps(one)}, {what}\n")
    count = max(len(one.steps), 1)
    rows = [(name, f"{one.share(ms):.1%}", f"{ms / count:,.2f}") for name, ms in _parts(one)]
    print_table(("a step" if one.steps else "the trace", "share", "ms"), [*rows, ("all", "", f"{one.wall_ms / count:,.2f}")])


def _print_ranks(summaries: Sequence[TraceSummary]) -> None:
    headers = ("rank", "ms a step", *(name.strip() for name, _ in _parts(summaries[0])), "trace")
    print_table(headers, [
        (str(one.rank), f"{one.wall_ms / max(len(one.steps), 1):,.2f}",
         *(f"{one.share(ms):.1%}" for _, ms in _parts(one)), str(one.path))
        for one in summaries
    ])  # fmt: skip


def _print_operators(header: str, operators: Sequence[OperatorTime], top: int) -> None:
    print_table(
        ("self ms", "share", "calls", "kind", header),
        [
            (f"{one.self_ms:,.2f}", f"{one.share:.1%}", f"{one.calls:,}", one.kind, _short(one.name))
            for one in operators[:top]
        ],
    )
    if len(operators) > top:
        print(f"and {len(operators) - top} more (--top)")


def _parts(one: TraceSummary) -> Iterator[tuple[str, float]]:
    """What a step's time went into, in milliseconds."""
    yield "compute", one.compute_ms
    yield "communication", one.communication_ms
    yield "  overlap", one.overlap_ms
    yield "  exposed", one.exposed_ms
    yield "idle", one.idle_ms


def _steps(one: TraceSummary) -> str:
    if not one.steps:
        return "no marked steps"
    return f"step {one.steps[0]}" if len(one.steps) == 1 else f"steps {one.steps[0]} to {one.steps[-1]}"


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}..."


def _as_json(one: TraceSummary, top: int) -> dict[str, Any]:
    parts = {name.strip(): ms for name, ms in _parts(one)}
    return {
        "rank": one.rank,
        "world_size": one.world_size,
        "path": str(one.path),
        "steps": one.steps,
        "gpu": one.gpu,
        "wall_ms": one.wall_ms,
        "ms": parts,
        "shares": {name: one.share(ms) for name, ms in parts.items()},
        "operators": [asdict(operator) for operator in one.operators[:top]],
        "kernels": [asdict(kernel) for kernel in one.kernels[:top]],
    }
