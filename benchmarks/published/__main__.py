"""Predicted against published: ``titan estimate`` for runs that others published.

    uv run python -m benchmarks.published [NAME ...]
    uv run python -m benchmarks.published NAME --json             # the whole estimate of a row
    uv run python -m benchmarks.published --save FOLDER           # keeps each row's estimate, and reads those that are there

Prints a line per row, and how the ratios of predicted to published speed are distributed by kind of job and by trainer.
A row takes ten seconds to minutes. Sources stand beside the rows (``rows_*.py``). Nothing is fitted to a row.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.published.errors import Compared, table_of_errors
from benchmarks.published.estimated import estimated, predict
from benchmarks.published.row import Row
from benchmarks.published.rows import EXPERTS, ROWS


def main() -> None:
    """Print a line per row, and the errors by kind."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows (default: all)")
    parser.add_argument("--json", action="store_true", help="print the whole estimate of one row, as JSON")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep each row's estimate in FOLDER/NAME.json")
    options = parser.parse_args()
    if unknown := set(options.names) - {row.name for row in ROWS}:
        parser.error(f"no row is called {sorted(unknown)[0]!r}; the rows are {', '.join(row.name for row in ROWS)}")
    rows = [row for row in ROWS if not options.names or row.name in options.names]
    if options.json:
        print(json.dumps(asdict(estimated(rows[0]))))
        return
    print("| run | trainer | mesh | tokens/s | published | ratio | GiB | published | ratio |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    compared = list[Compared]()
    for row in rows:
        found = _found(row, options.save)
        tokens, gib = found["tokens_per_second_per_gpu"], found["reserved_gib"]
        memory = " | |" if row.gib is None else f" {row.gib:.1f} | {gib / row.gib:.2f} |"
        speed = f"{tokens:,.0f} | {row.tokens:,.0f} | {tokens / row.tokens:.2f}"
        print(f"| {row.name} | {row.trainer.name} | {found['mesh']} | {speed} | {gib:.1f} |{memory}", flush=True)
        compared.append(Compared(row, found["mesh"], tokens / row.tokens, row in EXPERTS))
    print()
    print(table_of_errors(compared))


def _found(row: Row, folder: Path | None) -> dict[str, Any]:
    """Return the estimate of a row: that of ``folder``, if it has one."""
    if folder is None:
        return predict(row)
    path = folder / f"{row.name}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(predict(row)))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    main()
