"""Fuzzes configs, checkpoints and Hugging Face folders with random, damaged and absurd input.

Each case is generated from a seed and its number, so that it can be repeated on its own. A case fails if it raises an
exception that is not for users, takes longer than 10 s, exhausts memory, or if damage is accepted.
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
"""The function that runs each part (with the number of cases, the seed and a folder), and the default number of cases."""


def run_parts(counts: dict[str, int], seed: int, folder: Path, seconds: float | None = None) -> list[str]:
    """Run each part and print its result; return all failures.

    Args:
        counts: number of cases, by part.
        seconds: start no further part after this time.
    """
    failures: list[str] = []
    began = time.monotonic()
    for name, count in counts.items():
        if not count:
            continue
        if seconds is not None and time.monotonic() - began > seconds:
            failures.append(f"{name}: not started within {seconds:g} s")
            continue
        run, _ = PARTS[name]
        started = time.monotonic()
        (folder / name).mkdir(parents=True, exist_ok=True)
        found = run(count, seed, folder / name)
        print(f"{name}: {count} cases, {len(found)} failures, {time.monotonic() - started:.0f} s", flush=True)
        failures += [f"{name}: {failure}" for failure in found]
    return failures


def main() -> int:
    """Run the command; return exit status 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N", help=f"number of cases (default: {count})")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the cases (default: 0)")
    parser.add_argument("--seconds", type=float, metavar="T", help="start no further part after this time")
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
