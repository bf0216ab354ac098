"""The logger of docs/loggers.md, as the page has it."""

from __future__ import annotations

import re
import sqlite3
import sys
from pathlib import Path

from titan_core.cli.main import main
from titan_core.toolkit.json_lines import read_lines

PAGE = Path(__file__).parents[2] / "docs/loggers.md"


def test_the_logger_of_the_page_writes_the_metrics_of_a_run_and_of_its_continuation(in_tmp: Path) -> None:
    (code,) = re.findall(r"(?ms)^```python\n# sqlite_log.py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    assert len(code.splitlines()) <= 60
    (in_tmp / "sqlite_log.py").write_text(code)
    command = [
        "--plugin", "sqlite_log.py", "train", "tiny", "--sqlite.file", "metrics.db", "--job.dump_folder", "run",
        "--metrics.log_freq", "1", "--checkpoint.enable", "true", "--checkpoint.interval", "2", "--training.steps", "5",
    ]  # fmt: skip
    assert main([*command, "--training.stop_at_step", "3", "--checkpoint.keep_latest_k", "0"]) == 0
    database = sqlite3.connect("metrics.db")
    database.execute("INSERT INTO metrics SELECT run, 4, 'loss', 99.0 FROM metrics LIMIT 1")  # of a step that is lost
    database.commit()
    assert main(command) == 0
    found = database.execute("SELECT step, value FROM metrics WHERE name = 'loss' ORDER BY rowid").fetchall()
    database.close()
    assert found == [(line["step"], line["loss"]) for line in read_lines(in_tmp / "run/metrics.jsonl") if "loss" in line]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert "sqlite_log" not in sys.modules
