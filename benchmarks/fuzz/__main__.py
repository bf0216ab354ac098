"""Random, damaged and absurd input: configs, checkpoints, Hugging Face folders. ``python -m benchmarks.fuzz --help``.

Each case is made from a seed and its number, so that a failure can be repeated alone. A failure is an exception that is not
for users, an answer that takes longer than 10 s, runaway memory, or damage that is accepted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.fuzz import checkpoints, configs, hf_folders

PARTS = {"configs": (configs.run, 5000), "checkpoints": (checkpoints.run, 500), "hf": (hf_folders.run, 200)}
"""Name of a part -> what runs (cases, seed, folder), and how many cases by default."""


def run_parts(counts: dict[str, int], seed: int, folder: Path, seconds: float | None = None) -> list[str]:
    """Run each part, and print what it did; returns the failures of all.

    Args:
        counts: name of a part -> how many cases of it.
        seconds: stop beginning further parts after this long.
    """
    failures: list[str] = []
    began = time.monotonic()
    for name, count in counts.items():
        if not count:
            continue
        if seconds is not None and time.monotonic() - began > seconds:
            failures.append(f"{name}: not begun: {seconds:g} s are over")
            continue
        run, _ = PARTS[name]
        started = time.monotonic()
        (folder / name).mkdir(parents=True, exist_ok=True)
        found = run(count, seed, folder / name)
        print(f"{name}: {count} cases, {len(found)} failures, {time.monotonic() - started:.0f} s", flush=True)
        failures += [f"{name}: {one}" for one in found]
    return failures


def main() -> int:
    """Exit status 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N", help=f"cases (default: {count})")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed makes other cases (default: 0)")
    parser.add_argument("--seconds", type=float, metavar="T", help="stop beginning further parts after this long")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="titan-fuzz-") as folder:
        counts = {name: getattr(arguments, name) for name in PARTS}
        failures = run_parts(counts, arguments.seed, Path(folder), arguments.seconds)
    for failure in failures:
        print(f"FAILED {failure}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
