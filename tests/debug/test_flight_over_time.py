"""Which dumps of a running or restarted job belong together."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.made_dumps import ASLEEP, WITH_BACKGROUND, dump, entry, raised, verdict
from titan_debug.flight.analysis import analyse
from titan_debug.flight.dump import BACKGROUND, Entry, write_dump
from titan_debug.flight.progress import has_progressed
from titan_debug.flight.read import read_dumps


def test_stacks_of_an_earlier_attempt_count_until_a_later_one_dumps(tmp_path: Path) -> None:
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
    assert analyse(read_dumps(tmp_path)).kind == "missing"  # rank 1 left no dump in the newer attempt


def test_dumps_of_one_incident_are_found_although_clocks_differ(tmp_path: Path) -> None:
    """Rank 1 is one step behind, on a machine whose clock is slow."""
    write_dump(tmp_path, dump(0, [entry(1), entry(2, done=False)]))
    write_dump(tmp_path, dump(1, [entry(1)], step=2, stack=ASLEEP, time=1800.0))
    found = analyse(read_dumps(tmp_path))
    assert (found.kind, found.culprits) == ("behind", [1])
    earlier = (tmp_path / "rank-0.json").stat().st_mtime - 300
    os.utime(tmp_path / "rank-1.json", (earlier, earlier))  # it belongs to an earlier incident
    assert analyse(read_dumps(tmp_path)).culprits == [1] and analyse(read_dumps(tmp_path)).kind == "missing"


LATER = entry(3000)
"""Started 1100 s after the dumps were written."""


@pytest.mark.parametrize(
    ("before", "now", "lost", "progressed"),
    [
        ([entry(2, done=False)], [entry(2, done=False)], False, False),
        ([entry(2, done=False)], [entry(2)], True, False),  # gloo retires failed collectives
        ([entry(2, done=False)], [entry(2)], False, True),  # completed after all, now outside collectives
        ([entry(2, done=False)], [entry(2), LATER], True, True),  # failed in the next one
        ([entry(2)], [entry(2)], False, False),  # still late
        ([entry(2)], [entry(2), LATER], True, False),  # late until the others were gone
        ([entry(2)], [entry(2), entry(3000, done=False)], False, False),  # late, has just joined
        ([entry(2)], [entry(2), entry(1901, done=False)], False, True),  # waiting itself since shortly after the dump
        ([entry(2)], [entry(2), entry(1901)], True, True),  # the same, until the collective failed
        ([entry(2)], [entry(2), LATER], False, True),
        ([entry(2)], [entry(2), LATER, entry(3001)], True, True),
        ([entry(2)], [entry(2), entry(3000, group=BACKGROUND), entry(3001, group=BACKGROUND)], False, False),
    ],
)
def test_a_dump_of_a_slow_step_is_kept_until_the_rank_has_progressed(
    before: list[Entry], now: list[Entry], lost: bool, progressed: bool
) -> None:
    assert (
        has_progressed(dump(0, before, groups=WITH_BACKGROUND), dump(0, now, groups=WITH_BACKGROUND, time=3200.0), lost)
        is progressed
    )


def test_a_late_rank_that_thereby_lost_the_others_is_still_the_culprit() -> None:
    late = dump(1, [entry(1)], stack=ASLEEP, failure=replace(raised("RuntimeError", follows=True), stack=0))
    found = verdict(dump(0, [entry(1), entry(2)], failure=raised("RuntimeError", follows=True)), late)
    assert (found.kind, found.culprits) == ("behind", [1])


def test_a_dump_with_a_failure_survives_later_requests() -> None:
    failed = dump(0, [entry(2, done=False)], failure=raised("RuntimeError", follows=True))
    assert not has_progressed(failed, dump(0, [entry(2)]), lost=False)
