"""``titan calibrate``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.arguments import process_count
from titan_core.toolkit.launching import own_command
from titan_core.toolkit.status import StatusLine
from titan_core.toolkit.text import print_table, say, shorten


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan calibrate``."""
    parser.add_argument("--out", metavar="FILE", help="TOML file to write (default: print it)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to measure (default: CUDA if available)"
    )
    parser.add_argument(
        "--nproc-per-node", type=process_count, metavar="N",
        help="processes that measure together (default: one per GPU; on a CPU, one, and two for the messages between them)",
    )  # fmt: skip


def run(context: CommandContext) -> int:
    """Measure this machine and write its description."""
    options = context.arguments
    out = _checked(options.out) if options.out is not None else None
    with StatusLine():
        from titan_simulate.calibrate.calibrate import calibrate

        found = calibrate(options.device, options.nproc_per_node)
    if found is None:  # another rank writes
        return 0
    from titan_simulate.calibrate.write import noisy, rows, toml_of, write_machine

    text = toml_of(found, own_command(), datetime.now(UTC))
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            write_machine(text, Path(folder) / "machine.toml")
        print(text, end="")
    else:
        write_machine(text, out)
        print_table(
            ("measured", "", "spread"),
            [(what, figure, "" if spread is None else f"{spread:.0%}") for what, figure, spread in rows(found)],
        )
        say(f"\nwritten to {out}; use it with `titan estimate RECIPE --device {quote(str(out))}`")
    if varied := noisy(found):
        say(f"titan: noisy: {', '.join(varied)}; repeat it while the machine is idle", file=sys.stderr)
    return 0


def _checked(text: str) -> Path:
    """Return the path of the new file, before a minute is spent on measuring.

    Raises:
        UserError: a file cannot be written there, or would be lost.
    """
    out = Path(text)
    where = f"--out {shorten(text)}"
    if out.suffix != ".toml":
        raise UserError.one(where, "--device takes files whose names end in .toml", f"use {shorten(text)}.toml")
    if out.exists():
        raise UserError.one(where, "exists", "name a new file, or delete this one")
    if not out.parent.is_dir():
        raise UserError.one(where, f"{out.parent} is not a folder", "create it, or name another one")
    if not os.access(out.parent, os.W_OK):
        raise UserError.one(where, f"{out.parent} is not writable", "name a file elsewhere")
    return out
