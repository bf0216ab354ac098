"""Mutation testing: inserts one-line mistakes into a copy of the sources, one at a time, and checks that a test fails.

    uv run python -m benchmarks.mutants [--only NAME ...] [--list] [--narrow] [--results FILE]

A mutant is killed if a test fails. It is tried on its own tests, first on those of the default run, and if it survives them
on the wider suite of its package. The checkout is never changed. The exit status is 1 if a mutant survives that is not known
to be equivalent, or cannot be tried.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.mutants.catalogue import MUTANTS
from benchmarks.mutants.mutant import ROOT, WIDER, Mutant
from benchmarks.mutants.trial import DEFAULT, FULL, Verdict, copied_tree, preload, run_tests, try_out


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="names of mutants, or shell patterns")
    parser.add_argument("--list", action="store_true", help="list the mutants without trying them")
    parser.add_argument("--narrow", action="store_true", help="run only a mutant's own tests")
    parser.add_argument("--timeout", type=float, default=300.0, help="time limit of a mutant's own tests, in seconds")
    parser.add_argument("--results", type=Path, help="append a line for each mutant to this file")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if any(fnmatchcase(mutant.name, pattern) for pattern in arguments.only)]
    if not chosen:
        parser.error(f"no mutant is named {' or '.join(arguments.only)}; see --list")
    flaws = [f"{mutant.name}: {flaw}" for mutant in chosen if (flaw := mutant.flaw(ROOT))]
    if flaws:
        print("\n".join(flaws), file=sys.stderr)
        return 2
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name:50} {mutant.place}{'  (equivalent)' if mutant.equivalent else ''}")
        return 0
    survivors, untried = _try_all([mutant for mutant in chosen if not mutant.equivalent], arguments)
    equivalent = sum(1 for mutant in chosen if mutant.equivalent)
    tried = len(chosen) - equivalent - len(untried)
    share = f"{(tried - len(survivors)) / tried:.1%}" if tried else "none"
    print(f"\n{tried} mutants, {tried - len(survivors)} killed ({share}); {equivalent} equivalent mutants were not tried")
    for mutant in survivors:
        print(f"survived: {mutant.name} ({mutant.place}: {mutant.old!r} -> {mutant.new!r})")
    for name, reason in untried.items():
        print(f"not tried: {name}: {reason}")
    return 1 if survivors or untried else 0


def _try_all(chosen: list[Mutant], arguments: argparse.Namespace) -> tuple[list[Mutant], dict[str, str]]:
    """Try each mutant. Return those that survived, and the names of those that could not be tried, with the reason."""
    preload()
    survivors, untried = [], {}
    with copied_tree() as tree:
        passed: dict[tuple[str, str], str] = {}
        for mutant in chosen:
            try:
                verdict = _verdict(tree, mutant, arguments, passed)
            except RuntimeError as error:
                untried[mutant.name] = str(error)
                continue
            line = f"{'killed  ' if verdict.killed_by else 'SURVIVED'} {mutant.name:48} {verdict.killed_by}".rstrip()
            print(f"{line} ({verdict.seconds:.0f} s)", flush=True)
            if arguments.results is not None:
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
            if not verdict.killed_by:
                survivors.append(mutant)
    return survivors, untried


def _verdict(tree: Path, mutant: Mutant, arguments: argparse.Namespace, passed: dict[tuple[str, str], str]) -> Verdict:
    """Try a mutant on its own tests, first on those of the default run, then on the wider suite.

    Args:
        passed: what failed without a mutant, by test and marks; filled here.

    Raises:
        RuntimeError: it cannot be tried.
    """
    seconds = 0.0
    for marks in (DEFAULT, FULL):
        for test in mutant.tests:
            if (test, marks) not in passed:
                passed[test, marks] = run_tests(tree, [test], arguments.timeout, marks)
            if failing := passed[test, marks]:
                raise RuntimeError(f"{failing} fails without a mutant")  # and would kill every mutant
        verdict = try_out(tree, mutant, mutant.tests, arguments.timeout, marks)
        seconds += verdict.seconds
        if verdict.killed_by:
            return Verdict(verdict.killed_by, seconds)
    if not arguments.narrow:
        verdict = try_out(tree, mutant, WIDER[mutant.package], 4 * arguments.timeout)
        return Verdict(verdict.killed_by, seconds + verdict.seconds)
    return Verdict("", seconds)


if __name__ == "__main__":
    sys.exit(main())
