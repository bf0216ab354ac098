"""Runs a package's test suite against its wheel, in a fresh environment with only the declared dependencies::

uv run python -m ci titan-float8
uv run python -m ci titan-core --torch lowest --python 3.13
uv run python -m ci titan-ckpt -- -k resume -n 0
uv run python -m ci --list
"""

from __future__ import annotations

import argparse
import json
import sys

from ci.isolated import run_suite
from ci.workspace import packages


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ci", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("package", nargs="?", choices=list(packages()), metavar="PACKAGE")
    parser.add_argument("--list", action="store_true", help="print the names of the packages as JSON and exit")
    parser.add_argument(
        "--torch", choices=("locked", "lowest"), default="locked",
        help="use the versions in uv.lock (default), or the oldest torch that the packages allow",
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
    return run_suite(packages()[options.package], options.torch, options.python, sys.argv[end + 1 :])


sys.exit(main())
