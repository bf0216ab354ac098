"""The contents of a report, independent of its format: names, differences, summaries and ends of runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from harness.made_runs import BEGAN, end, start, validation, write_eventful, write_lines, write_run
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.charts import extremes, line_charts
from titan_report.expert_map import ExpertMap, expert_maps
from titan_report.page import page
from titan_report.shown import distinct_names, duration, finite
from titan_report.summary import model_of, summary
from titan_report.timeline import timeline


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300), st.integers(5, 50))
def test_thinning_keeps_extremes_ends_and_gaps(values: list[float | None], points: int) -> None:
    kept = extremes(values, points)
    assert kept == sorted(set(kept)) and len(kept) <= max(points, min(len(values), points))
    known = [value for value in values if value is not None]
    if known:
        assert {min(known), max(known)} <= {values[index] for index in kept}
    if values:
        assert {0, len(values) - 1} <= set(kept)
    assert (None in values) == any(values[index] is None for index in kept)


def test_curves_have_gaps_where_values_are_no_finite_numbers() -> None:
    values = [1, 2.5, math.inf, -math.inf, math.nan, None, "1"]
    assert [finite(value) for value in values] == [1, 2.5, None, None, None, None, None]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (-1, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3600 + 61, "1 h 1 min"), (50 * 3600, "2 d 2 h")],
)
def test_durations_have_their_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_the_memory_chart_notes_the_allocation_retries_of_all_runs(tmp_path: Path) -> None:
    more = lambda step: {"memory_retries": step // 30}  # noqa: E731
    runs = [RunLog.read(write_run(tmp_path / name, more=more)) for name in ("a", "b")]
    (memory,) = (chart for chart in line_charts(runs) if chart.name == "memory")
    assert memory.note == "6 allocation retries: memory ran short"


def test_the_last_rows_of_experts_have_a_map(tmp_path: Path) -> None:
    runs = [RunLog.read(write_run(tmp_path / name)) for name in ("a", "b")]
    lines = [{"step": 10, "rows": [[9, 1]]}, {"step": 20, "rows": [[0, 0], [3, 1]]}]
    lines += [
        {"step": 30, "rows": wrong} for wrong in ([[1], [1, 2]], [["a", 1]], [[-1, 3]], [[math.nan, 1]], [[]], [], "1", [0])
    ]
    file = tmp_path / "b" / "debug" / "expert_rows.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[1]\n{")
    assert expert_maps(runs) == [ExpertMap(1, 20, (1,), ((1.5, 0.5),))]
    text = page(runs)
    assert "<h2>Experts</h2>" in text and "Rows in step 20, relative to the mean of the block." in text
    assert "<h2>Experts</h2>" not in page(runs[:1])


def test_each_metric_with_a_group_has_a_chart(tmp_path: Path) -> None:
    figures = lambda step: {  # noqa: E731
        "objective/accuracy": step / 100, "auxiliary/balance": 1.0, "mine/drift": 0.5, "plain": 1.0,
        "tokens_seen/books": step,
    }  # fmt: skip
    runs = [RunLog.read(write_run(tmp_path / "a", more=figures)), RunLog.read(write_run(tmp_path / "b"))]
    charts = {chart.name: chart for chart in line_charts(runs)}
    accuracy = charts["objective-accuracy"]
    assert (accuracy.title, accuracy.unit) == ("accuracy", "objective")
    assert [(curve.run, curve.values[-1]) for curve in accuracy.curves] == [(0, runs[0].steps[-1]["step"] / 100)]
    assert {"auxiliary-balance", "mine-drift"} <= charts.keys()  # of a model and of a plugin that nothing here knows
    assert not [name for name in charts if "plain" in name or "tokens_seen" in name]


def test_validations_with_a_name_are_curves_of_the_loss(tmp_path: Path) -> None:
    named = [{"step": step, "validation_loss/averaged": 2.5, "time": BEGAN + step} for step in (20, 30)]
    runs = [RunLog.read(write_run(tmp_path / "a", validations=[named[0], validation(30, 3.0), named[1]]))]
    assert [(one["validation_loss"], one["validation_loss/averaged"]) for one in runs[0].validations] == [(3.0, 2.5)]
    (loss,) = (chart for chart in line_charts(runs) if chart.name == "loss")
    assert [curve.values for curve in loss.curves if curve.label == "validation (averaged)"] == [(2.5,)]


def test_runs_with_the_same_name_are_distinguished() -> None:
    folders = [Path("/x/a/run"), Path("/x/b/run"), Path("/x/c")]
    assert distinct_names(folders) == ["a/run", "b/run", "c"]
    assert distinct_names([Path("/a/x/run"), Path("/b/x/run"), Path("/run")]) == ["a/x/run", "b/x/run", "run"]
    assert distinct_names([Path("/a"), Path("/a")]) == ["a", "a"]


def test_differences_of_configs_and_versions(tmp_path: Path) -> None:
    one = write_run(
        tmp_path / "one", config="[a]\nsame = 1\nother = [1]\nmine = true\n[a.b]\ndeep = 1\n[job]\ndump_folder = 'x'\n"
    )
    two = write_run(
        tmp_path / "two", config="[a]\nsame = 1\nother = [2]\n[a.b]\ndeep = 2\n[job]\ndump_folder = 'y'\n", core="0.2"
    )
    text = page([RunLog.read(one), RunLog.read(two)])
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>', text)
    assert rows == [
        ("a.other", "[1]", "[2]"),
        ("a.mine", "true", "–"),
        ("a.b.deep", "1", "2"),
        ("titan-core", "0.1.0", "0.2"),
    ]
    same = page([RunLog.read(one), RunLog.read(write_run(tmp_path / "three", config=(one / "config.toml").read_text()))])
    assert "All keys have the same values." in same


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("file", "line", "flaw"),
    [
        ("events.jsonl", {}, "it has no 'event'"),
        ("events.jsonl", {"event": 1, "time": 1.0, "step": 1}, "its 'event' is not a string"),
        ("events.jsonl", {"event": "end", "time": "noon", "step": 1}, "its 'time' is not a time"),
        ("events.jsonl", {"event": "end", "time": float("nan"), "step": 1}, "its 'time' is not a time"),
        ("events.jsonl", {"event": "end", "time": 1.0, "step": None}, "its 'step' is not a whole number"),
        ("events.jsonl", {"event": "finding", "time": 1.0, "step": 1, "kind": "hang"}, "it has no 'message'"),
        ("metrics.jsonl", {"loss": 1.0}, "it has no 'step'"),
        ("metrics.jsonl", {"step": True, "loss": 1.0}, "its 'step' is not a whole number"),
        ("metrics.jsonl", {"step": 1, "loss": 1.0, "time": "noon"}, "its 'time' is not a time"),
    ],
)
def test_a_foreign_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, line: dict[str, Any], flaw: str
) -> None:
    run = write_run(tmp_path / "a", steps=2)
    write_lines(run / file, [line], mode="a")
    assert main(["report", str(run)]) == 2
    assert f"{run / file}:3: invalid record: {flaw}; remove this line" in capsys.readouterr().err


def test_the_config_and_the_events_are_read_without_the_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", config="[comm]\nsave_traces_folder = 'x'\n")
    (run / "metrics.jsonl").write_text("no JSON\n")
    assert RunLog.read_config(run) == {"comm": {"save_traces_folder": "x"}}
    assert [event["event"] for event in RunLog.read_events(run)] == ["start", "end"]
    (run / "config.toml").unlink()
    assert RunLog.read_config(run) == {}
    for read in (RunLog.read_config, RunLog.read_events):
        with pytest.raises(UserError, match="no such directory"):
            read(tmp_path / "none")


@pytest.mark.parametrize("count", [None, "many", -1, 0, 10**400])
def test_an_impossible_count_is_not_shown(count: object) -> None:
    config = {"model": {"name": "llama3", "flavor": "8B"}}
    assert model_of(config, [{**start(), "parameters": count}]) == "llama3 8B"
    assert model_of(config, [{**start(), "parameters": 5}, {**start(), "parameters": 1234}]) == "llama3 8B (1.2K parameters)"
    of_experts = {**start(), "parameters": 1234, "active_parameters": 150}
    assert model_of(config, [of_experts]) == "llama3 8B (1.2K parameters, 150 active)"
    assert model_of(config, [{**of_experts, "active_parameters": None}]) == "llama3 8B (1.2K parameters)"


def test_the_summary(tmp_path: Path) -> None:
    run = RunLog.read(write_eventful(tmp_path / "a"))
    (row,) = summary([run], ["a"]).rows
    assert dict(zip(summary([run], ["a"]).headers, row, strict=True)) == {
        "run": "a", "model": "llama3 8B", "steps": "100 of 100", "last loss": "4.1000", "best validation": "4.2500",
        "last validation": "4.2500", "tokens/s (median)": "4,096", "MFU (median)": "41.0%", "peak memory": "3.00 GiB",
        "wall time": "1 min 46 s", "state": "finished (2 attempts)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (end(50, at=60, reason="the dataset has ended"), "ended: the dataset has ended"),
        (end(50, at=60, preempted=True), "preempted"),
        (end(50, at=60, failed=True, error="ValueError: no"), "failed: ValueError: no"),
        (None, "no end event: killed or stalled"),
    ],
)
def test_the_summary_describes_how_a_run_ended(tmp_path: Path, ending: dict[str, Any] | None, state: str) -> None:
    run = RunLog.read(write_run(tmp_path / "a", steps=50, events=[start(), *([ending] if ending else [])]))
    assert summary([run], ["a"]).rows[0][-1] == state
    assert timeline(0, run).moments[-1].time == BEGAN + (60 if ending else 50)


def test_a_kill_has_the_time_of_the_last_line_before_the_next_start(tmp_path: Path) -> None:
    line = timeline(0, RunLog.read(write_eventful(tmp_path / "a")))
    assert [(moment.kind, moment.time - BEGAN) for moment in line.moments] == [
        ("start", 0), ("checkpoint", 40), ("finding", 45), ("kill", 45), ("restart", 60), ("end", 121),
    ]  # fmt: skip


def test_a_stage_that_follows_another_is_no_restart(tmp_path: Path) -> None:
    events = [
        start(stage="1"), end(4, at=10, reason="stage '1' is complete"),
        start(4, at=12, stage="long"), end(6, at=20, failed=True, error="ValueError: no"),
        start(4, at=30, stage="long"), end(8, at=40, completed=True),
    ]  # fmt: skip
    line = timeline(0, RunLog.read(write_run(tmp_path / "a", steps=8, events=events)))
    assert [(moment.kind, moment.step) for moment in line.moments] == [
        ("start", 0), ("stage", 4), ("end", 6), ("restart", 4), ("end", 8),
    ]  # fmt: skip
    assert line.moments[1].text.startswith("stage 'long' began after step 4: 2 processes")
    assert line.moments[3].text.startswith("stage 'long' restarted after step 4")


def test_a_branch_says_which_run_it_was_branched_off(tmp_path: Path) -> None:
    events = write_eventful(tmp_path / "a") / "events.jsonl"
    branch = {"event": "branch", "time": BEGAN - 5, "step": 1200, "parent": "../long"}
    events.write_text(json.dumps(branch) + "\n" + events.read_text())
    texts = [moment.text for moment in timeline(0, RunLog.read(tmp_path / "a")).moments]
    assert texts[0].startswith("branched off ../long after step 1,200: ")
    assert any(text.startswith("restarted after step") for text in texts)


BACK = {"event": "rewind", "time": BEGAN + 32, "step": 14, "from": 31, "documents": 12}


def test_a_rewind_is_marked_in_the_loss_and_listed(tmp_path: Path) -> None:
    events = [
        start(),
        BACK,
        start(14, at=40),
        {**BACK, "time": BEGAN + 45, "documents": 0},
        end(100, at=160, completed=True),
    ]
    folder = write_run(tmp_path / "a", events=events, more=lambda step: {} if step % 5 == 0 else {"loss": None})
    run = RunLog.read(folder)
    line = timeline(0, run)
    assert [(moment.kind, moment.step, moment.text) for moment in line.moments if moment.kind == "rewind"] == [
        ("rewind", 14, "went back from step 31 to step 14, without 12 documents"),
        ("rewind", 14, "went back from step 31 to step 14"),
    ]
    (loss,) = (chart for chart in line_charts([run]) if chart.name == "loss")
    (marks,) = (curve for curve in loss.curves if curve.style == "marks")
    logged = run.steps[9]  # the last one that has a loss, at or before the step
    assert (marks.run, marks.steps, marks.values) == (0, (14, 14), (logged["loss"],) * 2) and logged["step"] == 10
    assert marks.texts[0] == line.moments[1].text
    shown = page([run])
    assert all(
        text in shown for text in ("without 12 documents", "triangle-left", 'class="mark rewind"', 'class="stroke marks"')
    )
    assert "marks" not in {
        curve.style for chart in line_charts([RunLog.read(write_run(tmp_path / "b"))]) for curve in chart.curves
    }


def test_a_rewind_of_an_earlier_version_has_no_step_from(tmp_path: Path) -> None:
    old = {key: value for key, value in BACK.items() if key != "from"}
    run = RunLog.read(write_run(tmp_path / "a", events=[start(), {**old, "documents": 1}, end(100, at=160)]))
    assert [moment.text for moment in timeline(0, run).moments if moment.kind == "rewind"] == [
        "went back to step 14, without 1 document"
    ]  # fmt: skip
    with (tmp_path / "a/events.jsonl").open("a") as file:
        file.write(json.dumps({**BACK, "from": "here"}) + "\n")
    with pytest.raises(UserError, match="its 'from' is not a whole number"):
        RunLog.read(tmp_path / "a")
