"""Which dumps of a running or restarted job belong together."""

from __future__ import annotations

import os
from pathlib import Path

from harness.made_dumps import ASLEEP, dump, entry, verdict
from titan_debug.flight.diagnose import analyse
from titan_debug.flight.dump import read_dumps, write_dump


def test_dumps_of_one_incident_are_found_although_clocks_differ(tmp_path: Path) -> None:
    """Rank 1 is one step behind, on a machine whose clock is slow."""
    write_dump(tmp_path, dump(0, [entry(1), entry(2, done=False)]))
    write_dump(tmp_path, dump(1, [entry(1)], step=2, stack=ASLEEP, time=1800.0))
    found = analyse(read_dumps(tmp_path))
    assert (found.kind, found.culprits) == ("behind", [1])
    earlier = (tmp_path / "rank-0.json").stat().st_mtime - 300
    os.utime(tmp_path / "rank-1.json", (earlier, earlier))  # it belongs to an earlier incident
    assert analyse(read_dumps(tmp_path)).culprits == [1] and analyse(read_dumps(tmp_path)).kind == "missing"


def test_a_late_rank_that_thereby_lost_the_others_is_still_the_culprit() -> None:
    """It dumped before it failed, and the first dump of a step is kept."""
    found = verdict(dump(0, [entry(1), entry(2)], lost=True), dump(1, [entry(1)], stack=ASLEEP))
    assert (found.kind, found.culprits) == ("behind", [1])
