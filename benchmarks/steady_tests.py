"""Runs the quick test run again and again, each time in another random order, beside a busy loop on each core, with one and
with four workers in turn. Stops at the first run that fails, and prints how to repeat it.

    uv run python -m benchmarks.steady_tests [--runs 20] [--seed 1] [pytest's arguments, such as tests/launch -m "not long"]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

WORKERS = (1, 4)


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep cores busy, each with a process of its own."""
    processes = [multiprocessing.Process(target=_loop, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _loop() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each has the next one")
    arguments, more = parser.parse_known_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, a busy loop on each\n")
    print("| run | seed | workers | load at the end | minutes | result |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    for number in range(1, arguments.runs + 1):
        seed, workers = arguments.seed + number - 1, WORKERS[(number - 1) % len(WORKERS)]
        order = ["-p", "randomly", f"--randomly-seed={seed}", "--randomly-dont-reset-seed"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), *order, *more]
        started = time.monotonic()
        with busy_loops(cores):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            load = os.getloadavg()[0]
        minutes = (time.monotonic() - started) / 60
        lines = re.sub(r"\x1b\[[\d;]*m", "", done.stdout).splitlines()
        result = lines[-1].strip("= ") if lines else f"exit status {done.returncode}"
        print(f"| {number} | {seed} | {workers} | {load:.1f} | {minutes:.1f} | {result} |", flush=True)
        if done.returncode != 0:
            print("\n".join(["", *lines, "", f"repeat it with: {shlex.join(command)}"]))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
