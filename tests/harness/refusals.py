"""Asserts that a command is refused quickly, with one clear line and exit status 2, without a traceback."""

from __future__ import annotations

import time

import pytest

from titan_core.api._shown import LONGEST_SHOWN
from titan_core.cli.main import main

SECONDS = 10.0


def refused(command: list[str], capsys: pytest.CaptureFixture[str], named: str) -> None:
    began = time.monotonic()
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert time.monotonic() - began < SECONDS
    assert printed.startswith("titan: error: ") and "Traceback" not in printed
    assert named in printed
    assert all(
        len(line) < 10 * LONGEST_SHOWN + 2 * len(named) or len(command[-1]) > LONGEST_SHOWN for line in printed.splitlines()
    )
