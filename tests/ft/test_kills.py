"""The benchmark that kills a group, in short: the survivor's steps go on, and the weights are equal afterwards."""

from __future__ import annotations

import pytest

from benchmarks.ft import HEARTBEAT_MS, TIMEOUT_MS, measure, print_table


@pytest.mark.full
def test_a_killed_group_returns(capsys: pytest.CaptureFixture[str]) -> None:
    (kill,) = measure(1, "tiny")
    assert kill.longest_gap < (TIMEOUT_MS + HEARTBEAT_MS) / 1000
    assert kill.equal and kill.compared >= 3 and kill.alone >= 5
    print_table([kill])
    assert f"| 1 | {kill.at_step} |" in capsys.readouterr().out
