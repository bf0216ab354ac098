"""``titan flight analyse | dump``. Free of torch."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from titan_core.cli.arguments import json_argument
from titan_core.cli.output import print_json, print_table
from titan_core.errors import UserError
from titan_core.metrics.run_log import RunLog
from titan_debug.flight.analysis import Analysis, analyse
from titan_debug.flight.dump import RANK_FILE
from titan_debug.flight.read import dump_folder, read_dumps
from titan_debug.flight.request import ask

ANSWER_SECONDS = 15.0
"""How long `titan flight dump` waits for ranks to answer."""
EXIT_UNANSWERED = 1


def analyse_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan flight analyse``."""
    parser.add_argument("path", metavar="RUN|DIR", help="a run's directory, or a folder of dumps")
    json_argument(parser)


def dump_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan flight dump``."""
    parser.add_argument("run", metavar="RUN", help="the directory of a run that is going on")


def run_analyse(arguments: argparse.Namespace) -> int:
    """Say which rank holds the others up."""
    found = analyse(read_dumps(dump_folder(arguments.path)))
    if arguments.json:
        print_json(found.as_dict())
    else:
        _print(found)
    return 0


def _print(found: Analysis) -> None:
    print(found.verdict)
    for line in found.details:
        print(f"  {line}")
    print()
    print_table(
        ("rank", "step", "state"),
        [(str(one.rank), "?" if one.step is None else str(one.step), one.state) for one in found.ranks],
    )
    if found.notes:
        print()
    for note in found.notes:
        print(f"note: {note}")


def run_dump(arguments: argparse.Namespace) -> int:
    """Ask every rank of a running job for a dump; the status is 1 if some do not answer."""
    size = _world_size(arguments.run)
    folder = dump_folder(arguments.run)
    waiting = {folder / RANK_FILE.format(rank): rank for rank in range(size)}
    before = {path: _version(path) for path in waiting}
    try:
        ask(folder, "asked for by `titan flight dump`")
    except OSError as error:
        raise UserError.one(
            str(folder), f"cannot be written: {error.strerror}", "ask from where the run can write"
        ) from None
    deadline = time.monotonic() + ANSWER_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(0.2)
        waiting = {path: rank for path, rank in waiting.items() if _version(path) == before[path]}
    print(f"{size - len(waiting)} of {size} ranks dumped to {folder}; `titan flight analyse {arguments.run}` reads them")
    if waiting:
        print(f"not (yet): {', '.join(map(str, waiting.values()))}")
    return EXIT_UNANSWERED if waiting else 0


def _world_size(run: str) -> int:
    """How many ranks a run has that goes on.

    Raises:
        UserError: it does not.
    """
    states = [event for event in RunLog.read_events(run) if event["event"] in ("start", "end")]
    if not states or states[-1]["event"] != "start":
        raise UserError.one(f"run {run!r}", "it is not going on", "`titan flight analyse` reads what it has left")
    size: int = states[-1]["world_size"]
    return size


def _version(path: Path) -> Any:
    return (path.stat().st_mtime_ns, path.stat().st_ino) if path.exists() else None
