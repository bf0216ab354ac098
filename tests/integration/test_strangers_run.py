"""The directory of a stranger's run leads to files of the user: no command that shows a run reads or prints them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.made_runs import record, start, write_eventful
from titan_core.cli.main import main

SECRET = "the-user-s-own"
FILES = {
    "config.toml": f'[model]\nname = "{SECRET}"\n',
    "metrics.jsonl": json.dumps({**record(1), f"a/{SECRET}": 1.0}) + "\n",
    "events.jsonl": json.dumps(start(stage=SECRET)) + "\n",
    "plugins.json": json.dumps([{"name": "x", "distribution": SECRET, "version": "1"}]),
}
COMMANDS = {
    "report": ["report", "run", "--output", "page.html"],
    "watch": ["watch", "run", "--once"],
    "analyse": ["analyse", "run"],
}


@pytest.fixture
def run(in_tmp: Path) -> Path:
    write_eventful(in_tmp / "run")
    (in_tmp / "run/debug/crash").mkdir(parents=True)
    (in_tmp / "private").mkdir()
    for name, text in FILES.items():
        (in_tmp / "private" / name).write_text(text)
    return in_tmp / "run"


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", [*FILES, "previous"])
def test_a_link_is_not_followed(run: Path, command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / name
    path.unlink(missing_ok=True)
    path.symlink_to(Path("private" if name == "previous" else f"private/{name}").resolve())
    main(COMMANDS[command])
    shown = capsys.readouterr()
    page = Path("page.html").read_text() if Path("page.html").exists() else ""
    assert SECRET not in shown.out + shown.err + page and "Traceback" not in shown.err


@pytest.mark.parametrize("folder", ["/tmp", "../private", "debug/../../private", "link"])
def test_a_folder_that_its_config_names_is_in_the_run(run: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.toml").write_text(f'[numerics]\nsave_statistics_folder = "{folder}"\n')
    (run / "link").symlink_to(Path("private").resolve())
    shutil.copy("private/metrics.jsonl", "private/rank-0.jsonl")
    assert main(["statistics", "run"]) == 2
    errors = capsys.readouterr().err
    assert "must be a folder below the run's directory" in errors or "is a link to" in errors
