"""Trains families of transformers in small on each mesh, and compares losses, gradient norms and first gradients with a
plain loop of the library on one device. Writes the table::

    uv run python -m benchmarks.hf_families [--families llama,qwen3] [--meshes one,tp2] [--write FILE]

Each cell trains 5 steps of AdamW in float32 with gloo on CPUs, on long sequences and on packed short documents. The whole
table takes about half an hour of two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TITAN_DISABLE_PLUGINS"] = "harness_parallel"  # it stands in for titan-parallel in suites of single packages

from torch import Tensor

from harness.hf_families import (
    FAMILIES,
    MESHES,
    Curve,
    gradient_difference,
    largest_difference,
    of_library,
    settings,
    train,
    train_and_reference,
)
from harness.oracle import write_documents
from titan_testing.gloo_pool import GlooPool

LOSS, GRADIENT = 2e-6, 1e-5
"""Largest relative differences of a loss of 5 steps, and of a gradient of the first."""


@dataclass(frozen=True)
class Cell:
    """One run: the relative differences of losses, norms and gradients, or why it is refused."""

    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    refused: str = ""
    failed: str = ""

    @property
    def good(self) -> bool:
        """Whether it equals the library's loop."""
        return not (self.refused or self.failed) and self.loss <= LOSS and self.gradient <= GRADIENT

    def __str__(self) -> str:
        if self.refused or self.failed:
            return "refused" if self.refused else "FAILED"
        mark = "" if self.good else "**"
        return f"{mark}{self.loss:.0e} / {self.gradient:.0e}{mark}"


def compare(ranks: list[Curve], gradients: dict[str, Tensor], expected: Curve) -> Cell:
    """Return the cell of a run, given the gradients of the library's parameters."""
    return Cell(
        largest_difference(ranks[0].losses, expected.losses),
        largest_difference(ranks[0].norms, expected.norms),
        gradient_difference(gradients, expected.gradients)[0],
    )


def failure(error: Exception) -> Cell:
    """Return the cell of a run that a rank of has raised."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    refusals = [line for line in lines if "UserError" in line]
    if refusals:
        return Cell(refused=" ".join(refusals[-1].split()).partition("UserError: ")[2] or lines[-1])
    return Cell(failed="\n".join(lines[-12:]))


def family_rows(pool: GlooPool, family: str, meshes: list[str], kinds: list[bool], folder: Path) -> dict[str, Cell]:
    """Return the cells of a family by their column."""
    cells: dict[str, Cell] = {}
    for packed in kinds:
        data = write_documents(folder / "documents.jsonl") if packed else None
        label = " docs" if packed else ""
        try:
            ((found, expected),) = pool.run(1, train_and_reference, family, settings(family, "one", data, folder / "one"))
        except RuntimeError as error:
            cells |= {f"{mesh}{label}": failure(error) for mesh in meshes}
            continue
        for mesh in meshes:
            begun = time.perf_counter()
            if mesh == "one":
                cell = compare([found], found.gradients, expected)
            else:
                try:
                    ranks = pool.run(MESHES[mesh][0], train, settings(family, mesh, data, folder / "mesh"))
                    gradients = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
                    cell = compare(ranks, of_library(family, gradients), expected)
                except RuntimeError as error:
                    cell = failure(error)
            cells[f"{mesh}{label}"] = cell
            more = cell.refused or cell.failed
            print(f"{family:12} {mesh + label:16} {cell} {time.perf_counter() - begun:.1f} s {more}", flush=True)
    return cells


def table(rows: dict[str, dict[str, Cell]]) -> str:
    """Return the table in Markdown, and the refusals below it."""
    columns = list(next(iter(rows.values())))
    lines = [f"| family | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    lines += [f"| {family} | {' | '.join(str(cells[column]) for column in columns)} |" for family, cells in rows.items()]
    every = [cell for cells in rows.values() for cell in cells.values()]
    refused = sum(bool(cell.refused) for cell in every)
    lines += ["", f"{len(every)} cells: {sum(cell.good for cell in every)} equal, {refused} refused.", ""]
    reasons: dict[str, list[str]] = {}
    for family, cells in rows.items():
        for column, cell in cells.items():
            if not cell.good:
                reasons.setdefault(cell.refused or cell.failed or "differs", []).append(f"{family} {column}")
    lines += [f"* {', '.join(places)}: {' '.join(why.split())[:600]}" for why, places in reasons.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--data", choices=("long", "docs", "both"), default="both")
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    kinds = {"long": [False], "docs": [True], "both": [False, True]}[arguments.data]
    rows = {}
    pool = GlooPool()
    try:
        for family in arguments.families.split(","):
            with tempfile.TemporaryDirectory() as folder:
                rows[family] = family_rows(pool, family, arguments.meshes.split(","), kinds, Path(folder))
    finally:
        pool.close()
    print(table(rows))
    if arguments.write is not None:
        heading = (
            "# Families of transformers on meshes\n\nMade by `uv run python -m benchmarks.hf_families --write "
            "benchmarks/results/hf_families.md`. A cell has the largest relative difference of a loss of 5 steps, and of a "
            "gradient of the first step (relative to the largest element of the parameter's gradient), from a plain loop of "
            "the library on one device with its eager implementation. `docs`: packed short documents, which the loop "
            "computes one by one.\n\n"
        )
        arguments.write.write_text(heading + table(rows), encoding="utf-8")
    return int(any(cell.failed or not (cell.good or cell.refused) for cells in rows.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
