"""How good the tests are: mistakes of one line, each put into a copy of the sources, and whether the tests notice.

    uv run python -m benchmarks.mutants [--only NAME ...] [--list] [--narrow] [--results FILE]

A mutant is killed where a test fails; one that lives through its own tests is tried on its package's whole suite. The
checkout is never changed. It exits with status 1 where a mutant survives that is not known to be equivalent.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.mutants.catalogue import MUTANTS
from benchmarks.mutants.mutant import ROOT, Mutant
from benchmarks.mutants.trial import copied_tree, preload, run_tests, try_out


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="mutants by name or shell pattern")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    parser.add_argument("--narrow", action="store_true", help="try a mutant's own tests alone")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a mutant's own tests")
    parser.add_argument("--results", type=Path, help="append a line for each mutant to this file")
    arguments = parser.parse_args()
    chosen = [one for one in MUTANTS if any(fnmatchcase(one.name, pattern) for pattern in arguments.only)]
    if not chosen:
        parser.error(f"no mutant is called {' or '.join(arguments.only)}; see --list")
    flaws = [f"{one.name}: {flaw}" for one in chosen if (flaw := one.flaw(ROOT))]
    if flaws:
        print("\n".join(flaws), file=sys.stderr)
        return 2
    if arguments.list:
        for one in chosen:
            print(f"{one.name:50} {one.place}{'  (equivalent)' if one.equivalent else ''}")
        return 0
    survivors = _try_all([one for one in chosen if not one.equivalent], arguments)
    equivalent = sum(1 for one in chosen if one.equivalent)
    tried = len(chosen) - equivalent
    share = f"{(tried - len(survivors)) / tried:.1%}" if tried else "none"
    print(f"\n{tried} mutants, {tried - len(survivors)} killed ({share}); {equivalent} equivalent ones were not tried")
    for one in survivors:
        print(f"survived: {one.name} ({one.place}: {one.old!r} -> {one.new!r})")
    return 1 if survivors else 0


def _try_all(chosen: list[Mutant], arguments: argparse.Namespace) -> list[Mutant]:
    """Those that survived."""
    preload()
    survivors = []
    with copied_tree() as tree:
        passed: dict[str, str] = {}
        for mutant in chosen:
            # A test that fails without any mutant would kill them all.
            for test in mutant.tests:
                if test not in passed:
                    passed[test] = run_tests(tree, [test], arguments.timeout)
                if passed[test]:
                    raise SystemExit(f"{passed[test]} fails without any mutant")
            verdict = try_out(tree, mutant, arguments.timeout, wide=not arguments.narrow)
            line = f"{'killed  ' if verdict.killed_by else 'SURVIVED'} {mutant.name:48} {verdict.killed_by}".rstrip()
            print(f"{line} ({verdict.seconds:.0f} s)", flush=True)
            if arguments.results is not None:
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
            if not verdict.killed_by:
                survivors.append(mutant)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
