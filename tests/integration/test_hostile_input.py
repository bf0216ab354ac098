"""Names and files of others: a terminal obeys nothing in them, commands in messages are safe to copy, and nothing hangs."""

from __future__ import annotations

import io
import logging
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from harness.made_runs import end, start, write_run
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest
from titan_ckpt.format.stored import NAME, BrokenCheckpoint
from titan_core.api import UserError
from titan_core.toolkit.plain_json import read_object
from titan_core.toolkit.text import _ForPeople, print_table
from titan_report.dashboard import frame
from titan_report.followed_run import FollowedRun
from titan_simulate.engine import stub_libraries

OBEYED = "a\x1b]0;owned\x07\x1b[2Jb"
"""Sets the title of a terminal and clears its screen."""
SOURCES = Path(__file__).parents[2] / "packages"


def test_a_terminal_obeys_nothing_in_messages(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name",), [(OBEYED,)])
    record = logging.LogRecord("x", logging.WARNING, "x", 1, "skipped %s", (OBEYED,), None)
    shown = [capsys.readouterr().out, str(UserError.one(OBEYED, OBEYED)), _ForPeople().format(record)]
    for text in shown:
        assert "\x1b" not in text and "\x07" not in text and r"\x1b]0;owned\x07" in text


def test_a_terminal_obeys_nothing_in_a_watched_run(tmp_path: Path) -> None:
    run = FollowedRun(write_run(tmp_path / OBEYED, events=[start(), end(100, at=101, failed=True, error=OBEYED)]))
    run.poll()
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(frame(run, 200, 40))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text and r"\x1b]0;owned\x07" in text


def test_paths_in_suggested_commands_are_quoted() -> None:
    """A message may name a folder that somebody else has named, and its reader copies the command to a shell."""
    unquoted = [
        f"{file.relative_to(SOURCES)}: {command}"
        for file in SOURCES.rglob("src/**/*.py")
        for command in re.findall(r"`titan [^`\n]*\{[^`\n]*`", file.read_text(encoding="utf-8"))
        if any(not value.startswith("quote(") for value in re.findall(r"\{([^}]*)\}", command))
    ]
    assert unquoted == []


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Reading it would never end."""
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(BrokenCheckpoint, match="is not a regular file"):
        read_manifest(Folder(str(tmp_path)))
    with pytest.raises(UserError, match="is not a regular file"):
        read_object(tmp_path / NAME, "")


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_libraries_that_another_user_may_have_written_are_not_run(tmp_path: Path, mode: int) -> None:
    library = tmp_path / "libcuda.so.1"
    library.touch(0o755)
    tmp_path.chmod(0o700)
    stub_libraries._require_own(tmp_path, library)
    library.chmod(mode)
    with pytest.raises(stub_libraries.CannotSimulate, match="another user may have written"):
        stub_libraries._require_own(tmp_path, library)
