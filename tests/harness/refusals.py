"""Commands that end in one clear line and exit status 2, quickly, and never in a traceback."""

from __future__ import annotations

import time

import pytest

from titan_core.api.tools.shown import LONGEST_SHOWN
from titan_core.cli.main import main

SECONDS = 10.0


def refused(command: list[str], capsys: pytest.CaptureFixture[str], named: str) -> None:
    began = time.monotonic()
    assert main(command) == 2
    told = capsys.readouterr().err
    assert time.monotonic() - began < SECONDS
    assert told.startswith("titan: error: ") and "Traceback" not in told
    assert named in told
    assert all(
        len(line) < 10 * LONGEST_SHOWN + 2 * len(named) or len(command[-1]) > LONGEST_SHOWN for line in told.splitlines()
    )
