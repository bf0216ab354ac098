"""Time by cause of a run: where every second of every rank went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.made_runs import BEGAN, end, start, write_lines, write_run
from titan_core.api import UserError
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.figures import OF_CAUSES
from titan_report.followed_run import FollowedRun
from titan_report.goodput import CAUSES, TimeByCause, goodput_line, time_by_cause, time_note, time_table, with_earlier
from titan_report.page import page


def begun(step: int, at: float, began: float, launched: float, **more: Any) -> dict[str, Any]:
    """Return the start event of an attempt whose start has taken from ``began`` to ``at``."""
    return start(step, at=at, began=BEGAN + began, launched=BEGAN + launched, **more)


def spent(step: int, at: float, **seconds: float) -> dict[str, Any]:
    """Return the event of what the ranks have spent their time on."""
    causes = ("start", "compile", "steps", "data", "save", "evaluation")
    return {
        "event": "spent", "time": BEGAN + at, "step": step, "seconds": {cause: seconds.get(cause, 0.0) for cause in causes}
    }  # fmt: skip


FIRST = [
    begun(0, at=10, began=0, launched=0),
    spent(1, 14, start=20, compile=8),
    spent(21, 44, start=20, compile=8, steps=50, data=6, save=4),
    {"event": "checkpoint", "time": BEGAN + 54, "step": 31, "path": "checkpoint/step-31"},
    spent(41, 64, start=20, compile=8, steps=84, data=6, save=4, evaluation=6),
]
"""Of two ranks. After the checkpoint of step 31 they train for 17 s more (half of 34 s) before the last event."""
SECOND = [
    begun(31, at=106, began=100, launched=100),
    spent(33, 112, start=16, compile=4, steps=4),
    spent(60, 147, start=16, compile=4, steps=58, data=6, save=8, evaluation=2),
    spent(61, 150, start=16, compile=4, steps=60, data=8, save=8, evaluation=4),
    end(61, 150, failed=True),
]
"""A rank is lost at 148 s; rank 0 notices at 150 s."""
THIRD = [
    begun(60, at=152, began=148, launched=100, world_size=1),
    spent(61, 160, start=5, compile=2, steps=5),
    spent(100, 200, start=5, compile=2, steps=40, data=1, save=3, evaluation=1),
    end(100, 200, completed=True),
]
"""The launcher has restarted the job with one rank."""
KILLED = BEGAN + 70
"""When the first attempt logged its last record."""


def by_cause(events: list[dict[str, Any]], *times: float) -> TimeByCause:
    return time_by_cause(events, times)


def test_every_cause_of_three_attempts() -> None:
    found = by_cause([*FIRST, *SECOND, *THIRD], KILLED)
    assert found.seconds == pytest.approx(
        {
            "steps": (50 + 17) + 58 + 40,
            "lost": 17 + 2 * (70 - 64) + 2 * (148 - 147),
            "start": 20,
            "restart": 16 + 5,
            "compile": 8 + 4 + 2,
            "data": 6 + 6 + 1,
            "save": 4 + 8 + 3,
            "evaluation": 6 + 2 + 1,
            "idle": 2 * (100 - 70),
        }
    )
    assert found.wall == pytest.approx(2 * 148 + 1 * 52)
    assert found.difference == pytest.approx(0)
    assert found.goodput == pytest.approx(165 / 348)
    assert [attempt.ranks for attempt in found.attempts] == [2, 2, 1]
    assert [attempt.wall for attempt in found.attempts] == pytest.approx([2 * 70, 2 * (48 + 30), 52])
    assert goodput_line(found) == "47.4%, idle 17.2%, lost 8.9%, restart 6.0%, start 5.7%"
    assert time_note(found) == "Goodput: 47.4%, the share of the steps that count."
    rows = {row[0]: row[1:3] for row in time_table(found).rows}
    assert rows["idle"] == ("1 min 0 s", "17.2%") and rows["wall time"] == ("5 min 48 s", "100.0%")


def test_a_killed_run_that_nobody_resumed_has_lost_nothing_yet() -> None:
    found = by_cause(FIRST, KILLED)
    assert found.seconds == pytest.approx(
        {"steps": 84 + 12, "start": 20, "compile": 8, "data": 6, "save": 4, "evaluation": 6}
    )
    assert found.wall == pytest.approx(140) and found.difference == pytest.approx(0)


def test_a_run_killed_while_it_starts() -> None:
    found = by_cause(FIRST[:1])
    assert found.seconds == pytest.approx({"start": 20}) and found.goodput == 0
    again = by_cause([*FIRST[:1], begun(0, at=40, began=30, launched=30)])
    assert again.seconds == pytest.approx({"start": 20, "restart": 20, "idle": 40})
    assert again.difference == pytest.approx(0)


def test_an_older_checkpoint_loses_steps_of_several_attempts() -> None:
    """The third attempt begins before the second did."""
    third = [begun(21, at=160, began=155, launched=155), spent(22, 165, start=20), end(22, 165, completed=True)]
    found = by_cause([*FIRST, *SECOND, *third], KILLED)
    assert found.seconds["lost"] == pytest.approx(34 + 12 + 60)
    assert found.difference == pytest.approx(0)


def test_a_run_without_the_events_is_not_recorded() -> None:
    old = [start(), end(50, 60, preempted=True), start(50, at=80), end(100, 140, completed=True)]
    found = by_cause(old)
    assert found.seconds == {"not recorded": 2 * 140} and found.goodput is None
    assert time_note(found) == "Not recorded: an older version wrote this run."
    assert goodput_line(found) == "not recorded"
    mixed = by_cause([*old[:2], *SECOND])
    assert mixed.goodput is None and mixed.seconds["not recorded"] == 120 and mixed.seconds["idle"] == 80
    assert time_note(mixed).startswith("Goodput: not recorded")
    assert by_cause([]).seconds == {} and by_cause([]).goodput is None


def test_causes_that_do_not_sum_to_the_wall_time_are_mentioned() -> None:
    wrong = [begun(0, at=10, began=0, launched=0), spent(9, 50, start=20, steps=85), end(9, 50, completed=True)]
    assert "The causes sum to 105.0% of the wall time" in time_note(by_cause(wrong))
    right = [begun(0, at=10, began=0, launched=0), spent(9, 50, start=20, steps=80.9), end(9, 50, completed=True)]
    assert "sum to" not in time_note(by_cause(right))


def restarted_from_step_0(folder: Path) -> Path:
    """Write a run without checkpoints whose launcher started it again; ``previous`` has an older run, too."""
    again = [begun(0, at=75, began=70, launched=0), spent(9, 90, start=10, steps=30), end(9, 90, completed=True)]
    run = write_run(folder, steps=9, events=again)
    for name, events in (("1", [start(), end(9, 9)]), ("2", FIRST)):
        (run / "previous" / name).mkdir(parents=True)
        write_lines(run / "previous" / name / "events.jsonl", events)
    (run / "previous" / "3").mkdir()  # the config that a resumed attempt replaced
    return run


def test_attempts_without_checkpoints_are_found_in_the_folder_of_previous_files(tmp_path: Path) -> None:
    run = RunLog.read(restarted_from_step_0(tmp_path / "run"))
    found = by_cause(with_earlier(run.path, run.events))
    assert found.seconds == pytest.approx(
        {"steps": 30, "lost": 84 + 12, "start": 20, "restart": 10, "compile": 8, "data": 6, "save": 4, "evaluation": 6}
    )
    assert found.wall == pytest.approx(2 * 90) and found.difference == pytest.approx(0)
    followed = FollowedRun(run.path)
    followed.poll()
    assert followed.spent == found
    fresh = RunLog.read(write_run(tmp_path / "fresh", events=FIRST))  # not restarted by a launcher: older runs are others
    (fresh.path / "previous" / "1").mkdir(parents=True)
    write_lines(fresh.path / "previous" / "1" / "events.jsonl", FIRST)
    assert with_earlier(fresh.path, fresh.events) == fresh.events


def test_the_page_has_the_table_and_the_picture(tmp_path: Path) -> None:
    new = RunLog.read(write_run(tmp_path / "new", events=[*FIRST, *SECOND, *THIRD]))
    text = page([new, RunLog.read(write_run(tmp_path / "old"))])
    assert "Not recorded: an older version wrote this run." in text
    figures = json.loads(text.partition('id="figures">')[2].partition("</script>")[0])
    bars = figures["time-by-cause-0"]["data"]
    assert [bar["name"] for bar in bars] == list(by_cause([*FIRST, *SECOND, *THIRD], *new.times).seconds)
    assert all(bar["y"] == ["attempt 1", "attempt 2", "attempt 3"] for bar in bars)
    assert next(bar["x"] for bar in bars if bar["name"] == "restart") == pytest.approx([0, 16 / 3600, 5 / 3600])
    assert "time-by-cause-1" not in figures
    assert len(set(OF_CAUSES.values())) == len(OF_CAUSES) and list(OF_CAUSES) == list(CAUSES)


@pytest.mark.parametrize("seconds", [None, 3, {"steps": "1"}, {"steps": -1.0}, {"steps": True}, {"steps": 1e300}])
def test_damaged_times_are_refused(tmp_path: Path, seconds: object) -> None:
    run = write_run(tmp_path / "a", events=[*FIRST[:1], {**spent(1, 14), "seconds": seconds}])
    with pytest.raises(UserError, match="its 'seconds' is not a mapping of numbers"):
        RunLog.read(run)
    followed = FollowedRun(run)
    followed.poll()
    assert followed.damaged == 1


def test_an_absurd_number_of_ranks_is_no_traceback() -> None:
    huge = [begun(0, at=10, began=0, launched=0, world_size=10**400), spent(1, 14, steps=1)]
    assert time_table(by_cause(huge)).rows and goodput_line(by_cause(huge))
    none = [begun(0, at=10, began=0, launched=0, world_size=0)]
    assert time_table(by_cause(none)).rows and goodput_line(by_cause(none))
