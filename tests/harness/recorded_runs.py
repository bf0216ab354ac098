"""Data and settings of runs whose provenance is read, and the errors of commands."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from titan_core.cli.main import main
from titan_testing.jobs import TINY

LENGTH = 33
MIXTURE = (
    '[{dataset = "json", dataset_path = "lines", weight = 0.6, name = "lines"}, '
    '{dataset = "parquet", dataset_path = "rows.parquet", weight = 0.4, name = "rows"}]'
)
SETTINGS: dict[str, object] = {
    **TINY,
    "data.mixture": MIXTURE,
    "data.on_corrupt": "skip",
    "data.packing_window": 6,
    "checkpoint.enable": "true",
    "checkpoint.interval": 10,
    "checkpoint.keep_latest_k": 2,
    "job.device": "cpu",
    "job.dump_folder": "run",
    "metrics.enable_console": "false",
}


def text(number: int) -> str:
    return f"document {number} " + "of some words " * (number * 7 % 6)


def write_data(folder: Path) -> None:
    """Write lines of JSON in two files, some of them blank, empty or corrupt, one of them long; and rows of Parquet."""
    (folder / "lines").mkdir()
    lines = [json.dumps({"text": text(number)}) for number in range(24)]
    lines[3:3] = ["", "   "]
    lines[9] = json.dumps({"text": ""})
    lines[12] = "{broken"
    lines[15] = json.dumps({"text": "a long document " * 20})
    (folder / "lines/a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "lines/b.jsonl").write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in range(30, 40)))
    table = pyarrow.table({"text": [text(number) for number in range(50, 68)]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=5)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one error of a command."""
    capsys.readouterr()
    assert main(list(map(str, arguments))) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("titan: error: ")]
    assert len(lines) == 1
    return lines[0]
