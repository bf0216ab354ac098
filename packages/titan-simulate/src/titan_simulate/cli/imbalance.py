"""The argument ``--expert-imbalance``."""

from __future__ import annotations

import argparse

from titan_core.toolkit.arguments import number

MOST = 1024.0


def imbalance_argument(parser: argparse.ArgumentParser) -> None:
    """Add how unevenly the experts are chosen."""
    parser.add_argument(
        "--expert-imbalance", type=number("a factor", 1.0, MOST), default=1.0, metavar="FACTOR",
        help="rows that the experts of the busiest rank compute, relative to the mean of the ranks that divide the experts "
        "(default: 1, an even choice)",
    )  # fmt: skip
