"""Commands that write lock the folders that they write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan_core.cli.main import main
from titan_core.toolkit.folder_lock import FolderLock


@pytest.mark.parametrize(
    ("command", "held"),
    [
        (["compare", "llama3_debug", "--vary", "training.seed=1,2", "--output", "out"], "out/.lock"),
        (["verify", "llama3_debug", "--mesh", "1", "--mesh", "dp_shard=2", "--output", "out"], "out/.lock"),
        (["data", "tokenize", "llama3_debug", "--output", "out", "--workers", "1"], ".out.lock"),
        (["checkpoint", "convert", "source", "out"], ".out.lock"),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one[:2]),
)
def test_commands_that_write_to_a_locked_folder_are_refused(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], command: list[str], held: str
) -> None:
    other = FolderLock(in_tmp / "out", "x") if held == "out/.lock" else FolderLock.beside(in_tmp / "out", "x")
    with other:
        assert main(command) == 2
    assert f"process {os.getpid()} on host" in capsys.readouterr().err
