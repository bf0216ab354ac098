"""Dumps of a running job, or of one that was started again: which of them belong together."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.made_dumps import ASLEEP, BESIDE, dump, entry, raised, verdict
from titan_debug.flight.analysis import analyse
from titan_debug.flight.dump import BACKGROUND, Entry, write_dump
from titan_debug.flight.progress import has_progressed
from titan_debug.flight.read import read_dumps


def test_stacks_of_earlier_attempts_stay_readable_until_a_later_one_says_more(tmp_path: Path) -> None:
    header = "rank 1 of 2, attempt {}, process 7 on node, main thread 0x00000000000000ff\n"
    death = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00000000000000ff (most recent call first):\n"
    (tmp_path / "rank-1.stacks.txt").write_text(
        header.format(900.0) + death + '  File "/home/me/kernels.py", line 5 in launch\n' + header.format(1000.0)
    )
    write_dump(tmp_path, dump(0, [entry(2)], attempt=900.0, failure=raised("RuntimeError", follows=True)))
    found = analyse(read_dumps(tmp_path))
    assert (found.kind, found.culprits) == ("died", [1])
    assert "at /home/me/kernels.py:5 in launch" in found.verdict
    write_dump(tmp_path, dump(0, [entry(2)], failure=raised("RuntimeError", follows=True)))
    assert analyse(read_dumps(tmp_path)).kind == "missing"  # in the newer attempt it left nothing


def test_the_clocks_of_machines_do_not_decide_what_is_of_one_occasion(tmp_path: Path) -> None:
    """Rank 1 is a step behind, on a machine whose clock is slow."""
    write_dump(tmp_path, dump(0, [entry(1), entry(2, done=False)]))
    write_dump(tmp_path, dump(1, [entry(1)], step=2, stack=ASLEEP, time=1800.0))
    found = analyse(read_dumps(tmp_path))
    assert (found.kind, found.culprits) == ("behind", [1])
    earlier = (tmp_path / "rank-0.json").stat().st_mtime - 300
    os.utime(tmp_path / "rank-1.json", (earlier, earlier))  # it was written on an earlier occasion
    assert analyse(read_dumps(tmp_path)).culprits == [1] and analyse(read_dumps(tmp_path)).kind == "missing"


LATER = entry(3000)
"""Begun 1100 s after the dumps were written."""


@pytest.mark.parametrize(
    ("before", "now", "lost", "progressed"),
    [
        ([entry(2, done=False)], [entry(2, done=False)], False, False),
        ([entry(2, done=False)], [entry(2)], True, False),  # gloo lets go of what failed
        ([entry(2, done=False)], [entry(2)], False, True),  # it got through after all, and is elsewhere now
        ([entry(2, done=False)], [entry(2), LATER], True, True),  # and failed in the next one
        ([entry(2)], [entry(2)], False, False),  # late, and still so
        ([entry(2)], [entry(2), LATER], True, False),  # late, and then the others were gone
        ([entry(2)], [entry(2), entry(3000, done=False)], False, False),  # late, and there at last
        ([entry(2)], [entry(2), entry(1901, done=False)], False, True),  # it has waited ever since itself
        ([entry(2)], [entry(2), entry(1901)], True, True),  # so did this one, until that failed
        ([entry(2)], [entry(2), LATER], False, True),
        ([entry(2)], [entry(2), LATER, entry(3001)], True, True),
        ([entry(2)], [entry(2), entry(3000, group=BACKGROUND), entry(3001, group=BACKGROUND)], False, False),
    ],
)
def test_what_a_slow_step_was_dumped_for_is_kept_until_it_is_over(
    before: list[Entry], now: list[Entry], lost: bool, progressed: bool
) -> None:
    assert has_progressed(dump(0, before, groups=BESIDE), dump(0, now, groups=BESIDE, time=3200.0), lost) is progressed


def test_a_rank_that_was_late_and_lost_the_others_by_it_is_still_the_culprit() -> None:
    late = dump(1, [entry(1)], stack=ASLEEP, failure=replace(raised("RuntimeError", follows=True), stack=0))
    found = verdict(dump(0, [entry(1), entry(2)], failure=raised("RuntimeError", follows=True)), late)
    assert (found.kind, found.culprits) == ("behind", [1])


def test_a_dump_with_a_failure_is_kept_when_others_ask_afterwards() -> None:
    failed = dump(0, [entry(2, done=False)], failure=raised("RuntimeError", follows=True))
    assert not has_progressed(failed, dump(0, [entry(2)]), lost=False)
