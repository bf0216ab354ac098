"""Writes the report: one self-contained page that includes plotly.js and makes no network requests. Jinja escapes what comes
from runs, and the policy of the page lets a browser run its own scripts only."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.api.config.secrets import redact
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.attempts import Attempt, attempts_of
from titan_report.charts import Chart, line_charts
from titan_report.config_differences import config_differences, version_differences
from titan_report.expert_map import expert_maps
from titan_report.figures import (
    DARK,
    LIGHT,
    OF_CAUSES,
    Figure,
    chart_figure,
    colour_of,
    expert_figure,
    round_of,
    time_figure,
    timeline_figure,
    tint_of,
)
from titan_report.goodput import TimeByCause, time_by_cause, time_note, time_table, with_earlier
from titan_report.shown import Table, clock, distinct_names, finite, time_zone
from titan_report.stacks import stacks
from titan_report.summary import summary
from titan_report.timeline import Timeline, timelines

_NUMBER = re.compile(r"~?[-+]?[\d,.]+([eE][-+]?\d+)?(%| GiB)?|–|not finite|[\d,]+ of [\d,]+")
_AXES = (("steps", "Steps"), ("tokens", "Tokens"), ("hours", "Time"))
_MARKS = (
    ("start", "start, stage"),
    ("checkpoint", "checkpoint"),
    ("finding", "finding"),
    ("rewind", "went back"),
    ("end", "end"),
    ("kill", "killed"),
)
Positions = dict[str, list[Any]]
"""``{"steps": [...], "tokens": [...], "hours": [...]}``, all of one length. A position that is unknown is ``None``."""


def write_report(runs: Sequence[RunLog], file: Path, table: Table | None = None) -> None:
    """Write the report of ``runs`` to ``file``.

    Args:
        table: a table to show first, above the summary.

    Raises:
        UserError: ``file`` cannot be written.
    """
    text = page(runs, table)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError.one(str(file), f"cannot be written: {error.strerror}", "name another file") from None


def page(runs: Sequence[RunLog], table: Table | None = None) -> str:
    """Return the report of ``runs`` as HTML. Secrets in configs and events are masked, because reports are shared."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    names = distinct_names([run.path for run in runs])
    masked = [_without_secrets(run) for run in runs]
    charts = [*line_charts(masked), *stacks(masked)]
    found = positions(masked, charts) if charts else []
    identified: dict[str, Chart] = {}
    for chart in charts:
        run = f"-{chart.curves[0].run}" if chart.stacked else ""
        identity = f"chart-{chart.name}{run}"
        while identity in identified:  # as those of metrics a/b-c and a-b/c are
            identity += "-"
        identified[identity] = chart
    figures: dict[str, Figure] = {identity: chart_figure(chart, names) for identity, chart in identified.items()}
    times = _times_by_cause(masked, figures)
    shown = timelines(masked)
    figures |= {f"timeline-{one.run}": timeline_figure(one) for one in shown}
    experts = expert_maps(masked)
    figures |= {f"experts-{one.run}": expert_figure(one) for one in experts}
    style, plotly, script = _resource("page.css") + _palette(), get_plotlyjs(), _resource("page.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals |= {
        "round_of": round_of, "colour_of": colour_of, "numeric": _numeric, "styles_of": _styles_of,
        "tints_of": _tints_of, "causes_of": lambda spent: {cause: OF_CAUSES[cause] for cause in spent.seconds},
        "names": names,
    }  # fmt: skip
    return environment.from_string(_resource("page.html")).render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        made=f"{clock(time.time())}, {time_zone()}",
        zone=time_zone(),
        policy=_policy(plotly, script),
        style=style,
        plotly=plotly,
        script=script,
        tables=[*([] if table is None else [table]), summary(masked, names)],
        charts=identified,
        axes=_known_axes(found),
        positions=found,
        times=times,
        timelines=[(one, _events(one)) for one in shown],
        marks=_MARKS,
        experts=experts,
        differences=_differences(runs, names),
        configs=_configs(masked, names),
        figures=figures,
    )


def _policy(*scripts: str) -> str:
    """Return the policy of a page that runs ``scripts`` and no others, and loads nothing. Charts set styles of their own."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _without_secrets(run: RunLog) -> RunLog:
    events = [redact(event) for event in run.events]
    return replace(run, config=redact(run.config), events=events)


def _numeric(table: Table) -> list[bool]:
    """Return which columns have nothing but numbers."""
    columns = list(zip(*table.rows, strict=True)) or [() for _ in table.headers]
    return [bool(column) and all(map(_NUMBER.fullmatch, column)) for column in columns]


def _tints_of(chart: Chart) -> dict[str, tuple[str, float]]:
    """Return the colour and opacity of each part of a stacked chart, by label."""
    run, of = colour_of(chart.curves[0].run), len(chart.curves)
    return {curve.label: (f"run-{run}", tint_of(number, of)) for number, curve in enumerate(chart.curves)}


def _styles_of(chart: Chart) -> list[tuple[str, str]]:
    """Return the labels of the chart's curves and their styles."""
    kinds = {curve.label: curve.style for curve in reversed(chart.curves)}
    return sorted(kinds.items(), key=lambda kind: ("line", "dots", "faint", "marks").index(kind[1]))


def _known_axes(found: Sequence[Positions]) -> list[tuple[str, str]]:
    """Return the axes for which the steps of a run have places."""
    return [axis for axis in _AXES if any(any(place is not None for place in run[axis[0]]) for run in found)]


def _palette() -> str:
    """Return the colours of runs as CSS variables."""
    light, dark = (" ".join(f"--run-{n}: {c};" for n, c in enumerate(colours)) for colours in (LIGHT, DARK))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _times_by_cause(runs: Sequence[RunLog], figures: dict[str, Figure]) -> list[tuple[int, TimeByCause, str, Table]]:
    found = []
    for number, run in enumerate(runs):
        spent = time_by_cause(with_earlier(run.path, run.events), run.times)
        if spent.attempts:
            found.append((number, spent, time_note(spent), time_table(spent)))
            if spent.is_recorded:
                figures[f"time-by-cause-{number}"] = time_figure(spent, number)
    return found


def _events(timeline: Timeline) -> Table:
    rows = tuple(
        (clock(moment.time), "" if moment.step is None else f"{moment.step:,}", moment.text) for moment in timeline.moments
    )
    return Table("", ("time", "step", "event"), rows)


def _differences(runs: Sequence[RunLog], names: Sequence[str]) -> list[tuple[Table, str]]:
    if len(runs) < 2:
        return []
    config, versions = config_differences(runs, names), version_differences(runs, names)
    lead = "Keys whose values differ between the runs." if config.rows else "All keys have the same values."
    shown = [(config, lead)]
    if versions.rows:
        shown.append((versions, "Plugins whose versions differ between the runs."))
    return shown


def _configs(runs: Sequence[RunLog], names: Sequence[str]) -> Mapping[str, str]:
    import tomli_w

    return {name: tomli_w.dumps(run.config) for name, run in zip(names, runs, strict=True) if run.config}


def _resource(name: str) -> str:
    return resources.files("titan_report").joinpath(name).read_text(encoding="utf-8")


def positions(runs: Sequence[RunLog], charts: Iterable[Chart]) -> list[Positions]:
    """Return the positions of all steps that ``charts`` draw, for each run."""
    drawn: list[set[int]] = [set() for _ in runs]
    for chart in charts:
        for curve in chart.curves:
            drawn[curve.run].update(curve.steps)
    return [_positions(run, sorted(steps)) for run, steps in zip(runs, drawn, strict=True)]


def _positions(run: RunLog, steps: list[int]) -> Positions:
    tokens = [(record["step"], finite(record.get("tokens_seen"))) for record in run.steps]
    attempts = attempts_of(run.events, run.times)
    timed = [(record["step"], record.get("time")) for record in (*run.validations, *run.steps)]
    hours = [(step, _training_hours(attempts, time)) for step, time in timed]
    return {"steps": steps, "tokens": _interpolated(tokens, steps), "hours": _interpolated(hours, steps)}


def _training_hours(attempts: Sequence[Attempt], time: float | None) -> float | None:
    """Return the hours that attempts at the run took until ``time``, without the pauses between them."""
    if time is None or not attempts or time < attempts[0].began:
        return None
    return sum(min(attempt.last, time) - attempt.began for attempt in attempts if attempt.began <= time) / 3600


def _interpolated(known: Sequence[tuple[int, float | None]], steps: Sequence[int]) -> list[float | None]:
    """Return the value at each of ``steps``, interpolated between the two nearest known ones; ``None`` outside of them."""
    points = sorted({step: value for step, value in known if value is not None}.items())
    found: list[float | None] = []
    for step in steps:
        after = bisect_left(points, (step,))
        if after < len(points) and points[after][0] == step:
            found.append(points[after][1])
        elif 0 < after < len(points):
            (first, low), (last, high) = points[after - 1], points[after]
            found.append(low + (high - low) * (step - first) / (last - first))
        else:
            found.append(None)
    return found
