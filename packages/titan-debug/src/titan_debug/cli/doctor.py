"""``titan doctor``: reports what does not work on this machine, and what to do. Imports torch only with ``--full``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from titan_core.api import CheckResult, CommandContext, Health, HealthCheck, HealthContext, UserError
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.text import print_json, say

_MARKS = {Health.OK: "ok", Health.NOTE: "note", Health.WARNING: "WARN", Health.ERROR: "FAIL"}
_WIDEST = 110
"""Maximum width of the report in columns, on a wide terminal and in files."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan doctor``."""
    parser.add_argument(
        "--full", action="store_true", help="also compute, compile, connect processes and use the network (about a minute)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs"), metavar="DIR", help="where runs will be written (default: outputs)"
    )
    parser.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="check that this machine can reach a rendezvous there"
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Run the checks of all plugins. Returns 1 if any of them failed."""
    arguments = context.arguments
    health = HealthContext(context.registry, arguments.folder, arguments.rdzv_endpoint)
    results: list[tuple[str, CheckResult]] = []
    checks = [check for check in context.registry.all(HealthCheck) if arguments.full or not check.slow]
    for check in checks:
        found = []
        for result in _results(check, health):
            found.append(result)
            if not arguments.json:
                _print(result, header="" if len(found) > 1 else check.name)
        results += [(check.name, result) for result in found]
    counts = {health: sum(result.health is health for _, result in results) for health in Health}
    if arguments.json:
        print_json({
            "checks": [
                {"group": group, "subject": result.subject, "health": str(result.health), "detail": result.detail,
                 "fix": result.fix}
                for group, result in results
            ],
            **{f"{health}s": counts[health] for health in (Health.WARNING, Health.ERROR)},
        })  # fmt: skip
    else:
        _print_summary(counts[Health.WARNING], counts[Health.ERROR], arguments.full)
    return 1 if counts[Health.ERROR] else 0


def _results(check: HealthCheck, context: HealthContext) -> Iterator[CheckResult]:
    """Yield the results of ``check``. If it raises, the failure is a result, and the other checks still run."""
    try:
        yield from check.check.load()(context)
    except UserError as error:
        for problem in error.problems:
            yield CheckResult(check.name, Health.ERROR, f"{problem.where}: {problem.why}", problem.fix)
    except Exception as error:
        if os.environ.get("TITAN_TRACEBACK"):
            raise
        why = f"the check raised {type(error).__name__}: {' '.join(str(error).split())}"
        yield CheckResult(check.name, Health.ERROR, why, "update its plugin (TITAN_TRACEBACK=1 shows the traceback)")


def _width() -> int:
    """Return the width of the report: of the terminal if it is printed to one, but wide enough for a word."""
    return max(40, min(_WIDEST, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else _WIDEST


def _print(result: CheckResult, header: str) -> None:
    if header:
        say(f"{header}")
    start = f"  {_MARKS[result.health]:<4}  {result.subject}: "
    indent = " " * 8
    width = _width()
    for line in wrap(result.detail, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False):
        say(line)
    if result.fix:
        fix = wrap(
            result.fix, width, initial_indent=f"{indent}fix: ", subsequent_indent=f"{indent}     ", break_on_hyphens=False
        )
        say("\n".join(fix))


def _print_summary(warnings: int, errors: int, full: bool) -> None:
    print()
    if errors or warnings:
        say(f"{errors} failed, {warnings} warning{'s' * (warnings != 1)}")
    else:
        print("Everything works.")
    if not full:
        print("Run `titan doctor --full` to compute, compile and connect processes as well.")
