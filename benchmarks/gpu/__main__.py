"""Runs Titan on one GPU: first the tests marked ``gpu``, then 8B-shaped layers in many configurations, compared with a bare
loop in plain torch and, where it is installed, with TorchTitan. Writes ``report.md`` and ``report.json``.

    uv run python -m benchmarks.gpu --out results --predict h100           # first: an estimate of each row, without a GPU
    uv run python -m benchmarks.gpu --out results                          # on the machine
    uv run python -m benchmarks.gpu --out results --no-tests --only "titan, compiled" "bare loop, compiled"
    uv run python -m benchmarks.gpu --out results --toy --device cpu       # checks the benchmark itself
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, Case, Plan, chosen, plan
from benchmarks.gpu.gpu_tests import GpuTests, run_tests
from benchmarks.gpu.machine import NoGPU, describe
from benchmarks.gpu.predict import predict, predicted
from benchmarks.gpu.processes import LOG, run_case
from benchmarks.gpu.report import markdown, table_of

SHARE_OF_TESTS = 0.5
"""Share of the time that the tests may take."""
LEAST_SECONDS = {False: 30.0, True: 8.0}
"""Time that a configuration needs at least, at full and at toy size; with less left, none is started."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the report and the logs")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default: 8)")
    parser.add_argument("--case-seconds", type=float, default=120.0, help="limit of one configuration (default: 120)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="a toy model, to check the benchmark")
    parser.add_argument("--layers", type=int, default=8, help="layers of the 8B model (default: 8, which fit in 80 GB)")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="configurations whose names are or contain these")
    parser.add_argument("--no-tests", action="store_true", help="do not run the tests")
    parser.add_argument("--tests", metavar="EXPRESSION", help="run only the tests that match (pytest's -k)")
    parser.add_argument("--workers", type=int, default=8, help="processes of the tests (default: 8)")
    parser.add_argument(
        "--predict", metavar="MACHINE",
        help="estimate every row for a machine of `titan estimate`, and measure nothing; a later run with the same --out "
             "prints measured / predicted",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the configurations and exit")
    options = parser.parse_args()
    if not options.list and options.out is None:
        parser.error("--out is required")
    return options


def main() -> int:
    """Run everything; return 1 if a test or a configuration failed."""
    options = arguments()
    if options.list:
        print("\n".join(case.name for case in CASES))
        return 0
    started = time.time()
    end = started + 60 * options.minutes
    try:
        cases = chosen(options.only, options.device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    of_all = plan(options.device, options.toy, options.layers, options.seq_len, options.batch)
    if options.predict:
        return predict(cases, of_all, options.predict, options.out)
    try:
        machine = describe(options.device)
    except NoGPU as error:
        print(f"error: {error}; --toy --device cpu checks the benchmark without one", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / LOG).unlink(missing_ok=True)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "machine": machine,
        "toy": options.toy,
        "tests": None,
        "rows": [],
        "left_out": {},
        "predictions": predicted(of_all, options.out),
        "plan": vars(of_all),
    }
    if not options.no_tests:
        limit = SHARE_OF_TESTS * 60 * options.minutes
        tests = run_tests(options.out, options.device, limit, options.workers, options.tests)
        report["tests"] = asdict(tests)
        _print_tests(tests)
        _write(report, options.out, started)
    _measure(cases, of_all, report, options, started, end)
    print("\n".join(["", *table_of(report)]))
    failed = report["tests"] is not None and (report["tests"]["failed"] or report["tests"]["problem"])
    return 1 if failed or any(row["failure"] for row in report["rows"]) else 0


def _measure(
    cases: list[Case], of_all: Plan, report: dict[str, Any], options: argparse.Namespace, started: float, end: float
) -> None:
    """Run the cases that fit into the time, and write the report after each, so that nothing measured is lost."""
    with tempfile.TemporaryDirectory(prefix="titan-gpu-caches-") as caches:
        for case in cases:
            if case.kind == "torchtitan" and find_spec("torchtitan") is None:
                report["left_out"][case.name] = "TorchTitan is not installed"
                continue
            left = end - time.time()
            if left < LEAST_SECONDS[options.toy]:
                report["left_out"][case.name] = "no time left"
                continue
            _measure_one(case, of_all, report, options, min(options.case_seconds, left), Path(caches))
            _write(report, options.out, started)
    _write(report, options.out, started)


def _measure_one(
    case: Case, of_all: Plan, report: dict[str, Any], options: argparse.Namespace, limit: float, caches: Path
) -> None:
    outcome = run_case(case, of_all, options.out, limit, caches)
    row = {"name": case.name, "kind": case.kind, "settings": of_all.overrides(case), "seconds": outcome.seconds}
    report["rows"].append({**row, "failure": outcome.failure, "result": outcome.result})
    print(f"{case.name}: {_shown(outcome.result, outcome.failure)} ({outcome.seconds:.0f} s)", flush=True)


def _write(report: dict[str, Any], folder: Path, started: float) -> None:
    report["seconds"] = time.time() - started
    (folder / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")


def _shown(result: dict[str, Any] | None, failure: str) -> str:
    return failure if result is None else f"{result['tokens_per_second']:,.0f} tokens/s"


def _print_tests(tests: GpuTests) -> None:
    counts = f"{tests.passed} passed, {len(tests.failed)} failed, {len(tests.skipped)} skipped"
    print(f"tests: {'; '.join(filter(None, [counts, tests.problem]))} ({tests.seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
