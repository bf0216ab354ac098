"""Runs a package's test suite against its wheel, in a fresh environment with only the declared dependencies::

uv run python -m ci titan-float8
uv run python -m ci titan-core --resolution lowest-direct --python 3.13
uv run python -m ci titan-ckpt -- -k resume -n 0
uv run python -m ci titan --resolution lowest-direct    # all packages together: the short list of tests
uv run python -m ci --list
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import get_args

from ci.isolated import Resolution, run_tests
from ci.short_list import TESTS
from ci.workspace import ROOT, packages

SYSTEM = "titan"
"""All packages together."""


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ci", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("package", nargs="?", choices=[SYSTEM, *packages()], metavar="PACKAGE")
    parser.add_argument("--list", action="store_true", help="print the names of the packages as JSON and exit")
    parser.add_argument(
        "--resolution", choices=get_args(Resolution), default="locked",
        help="use the versions in uv.lock (default), or the lowest of each dependency that the packages declare",
    )  # fmt: skip
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="Python interpreter or version of the environment (default: the current one)",
    )
    # Arguments after `--` are for pytest. argparse would mix them with the options before it.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    if options.list:
        print(json.dumps(list(packages())))
        return 0
    if options.package is None:
        parser.error(f"name a package: {', '.join(packages())}")
    arguments = sys.argv[end + 1 :]
    if options.package == SYSTEM:
        return run_tests(
            list(packages().values()), ["-m", "not long", *TESTS], options.resolution, options.python, arguments
        )
    package = packages()[options.package]
    suite = str(package.suite.relative_to(ROOT))
    return run_tests(
        [package], ["-m", "not long and (not full or slow)", suite], options.resolution, options.python, arguments
    )


sys.exit(main())
