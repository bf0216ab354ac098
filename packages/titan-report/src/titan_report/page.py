"""Writes the report: one self-contained page that includes plotly.js and makes no network requests."""

from __future__ import annotations

import html
import string
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from titan_core.api import UserError
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.secrets import redact
from titan_report import html_parts as parts
from titan_report.axes import positions
from titan_report.bill import bill_note, bill_of, bill_table, with_earlier
from titan_report.charts import line_charts
from titan_report.config_differences import config_differences, version_differences
from titan_report.expert_map import expert_maps
from titan_report.figures import Figure, bill_figure, chart_figure, expert_figure, timeline_figure
from titan_report.palette import OF_CAUSES
from titan_report.shown import Table, clock, distinct_names, time_zone
from titan_report.stacks import stacks
from titan_report.summary import summary
from titan_report.timeline import Timeline, timelines


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
    from plotly.offline import get_plotlyjs

    names = distinct_names([run.path for run in runs])
    figures: dict[str, Figure] = {}
    masked = [_without_secrets(run) for run in runs]
    body = [*_tables(masked, names, table), *_charts(masked, names, figures), *_bills(masked, names, figures)]
    body += [
        *_timelines(masked, names, figures),
        *_experts(masked, names, figures),
        *_differences(runs, names),
        *_configs(masked, names),
    ]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    return string.Template(_resource("page.html")).substitute(
        title=html.escape(title),
        made=html.escape(f"{clock(time.time())}, {time_zone()}"),
        style=_resource("page.css") + parts.palette_style(),
        plotly=get_plotlyjs(),
        body="\n".join(body),
        figures=parts.json_for_script(figures),
        script=_resource("page.js"),
    )


def _without_secrets(run: RunLog) -> RunLog:
    events = [redact(event) for event in run.events]
    return replace(run, config=redact(run.config), events=events)


def _tables(runs: Sequence[RunLog], names: Sequence[str], table: Table | None) -> list[str]:
    first = [] if table is None else [parts.table(table, names)]
    return [*first, parts.table(summary(runs, names), names)]


def _charts(runs: Sequence[RunLog], names: Sequence[str], figures: dict[str, Figure]) -> list[str]:
    charts = [*line_charts(runs), *stacks(runs)]
    if not charts:
        return [f'<section class="card">{parts.paragraph("No step has been logged yet.")}</section>']
    figures.update((parts.chart_id(chart), chart_figure(chart, names)) for chart in charts)
    cards = "\n".join(parts.chart_card(chart, names, wide=chart.name == "loss") for chart in charts)
    found = positions(runs, charts)
    data = f'<script type="application/json" id="positions">{parts.json_for_script(found)}</script>'
    return [parts.controls(names, found), f'<div class="grid">{cards}</div>{data}']


def _bills(runs: Sequence[RunLog], names: Sequence[str], figures: dict[str, Figure]) -> list[str]:
    cards = []
    for number, run in enumerate(runs):
        bill = bill_of(with_earlier(run.path, run.events), run.times)
        if not bill.attempts:
            continue
        heading = f"<h3>{parts.name_of_run(number, names)}</h3>" if len(runs) > 1 else ""
        shown = parts.paragraph(bill_note(bill))
        if bill.is_recorded:
            identity = f"bill-{number}"
            figures[identity] = bill_figure(bill, number)
            height = 80 + 26 * min(len(bill.attempts), 20)
            shown += parts.stack_key({cause: OF_CAUSES[cause] for cause in bill.seconds})
            shown += f'<div class="chart" style="height: {height}px" id="{identity}"></div>'
            shown += parts.table(bill_table(bill), ())
        cards.append(f'<div class="of-timeline" data-of-run="{number}">{heading}{shown}</div>')
    return [f'<section class="card"><h2>Bill</h2>{"".join(cards)}</section>'] if cards else []


def _timelines(runs: Sequence[RunLog], names: Sequence[str], figures: dict[str, Figure]) -> list[str]:
    cards = []
    for timeline in timelines(runs):
        run, identity = timeline.run, f"timeline-{timeline.run}"
        figures[identity] = timeline_figure(timeline)
        heading = f"<h3>{parts.name_of_run(run, names)}</h3>" if len(runs) > 1 else ""
        cards.append(
            f'<div class="of-timeline" data-of-run="{run}">{heading}<div class="chart timeline" id="{identity}"></div>'
            f"{parts.details('All events', _events(timeline))}</div>"
        )
    key = "".join(f'<li><i class="mark {kind}"></i>{text}</li>' for kind, text in _MARKS)
    if not cards:
        return []
    note = parts.paragraph(f"Times are in {time_zone()}.")
    return [f'<section class="card"><h2>Timeline</h2>{note}<ul class="key">{key}</ul>{"".join(cards)}</section>']


def _experts(runs: Sequence[RunLog], names: Sequence[str], figures: dict[str, Figure]) -> list[str]:
    cards = []
    for found in expert_maps(runs):
        identity = f"experts-{found.run}"
        figures[identity] = expert_figure(found)
        heading = f"<h3>{parts.name_of_run(found.run, names)}</h3>" if len(runs) > 1 else ""
        step = parts.paragraph(f"Rows in step {found.step:,}, relative to the mean of the block.")
        chart = f'<div class="chart" id="{identity}"></div>'
        cards.append(f'<div class="of-timeline" data-of-run="{found.run}">{heading}{step}{chart}</div>')
    return [f'<section class="card"><h2>Experts</h2>{"".join(cards)}</section>'] if cards else []


_MARKS = (
    ("start", "start, stage"),
    ("checkpoint", "checkpoint"),
    ("finding", "finding"),
    ("rewind", "went back"),
    ("end", "end"),
    ("kill", "killed"),
)


def _events(timeline: Timeline) -> str:
    rows = tuple(
        (clock(moment.time), "" if moment.step is None else f"{moment.step:,}", moment.text) for moment in timeline.moments
    )
    omitted = f"{timeline.omitted:,} older checkpoints and findings are not shown." if timeline.omitted else ""
    return parts.table(Table("", ("time", "step", "event"), rows), ()) + parts.paragraph(omitted)


def _differences(runs: Sequence[RunLog], names: Sequence[str]) -> list[str]:
    if len(runs) < 2:
        return []
    config, versions = config_differences(runs, names), version_differences(runs, names)
    lead = "Keys whose values differ between the runs." if config.rows else "All keys have the same values."
    shown = [parts.table(config, names, lead, align_numbers=False)]
    if versions.rows:
        shown.append(parts.table(versions, names, "Plugins whose versions differ between the runs.", align_numbers=False))
    return shown


def _configs(runs: Sequence[RunLog], names: Sequence[str]) -> list[str]:
    import tomli_w

    folded = [
        parts.details(parts.name_of_run(number, names), parts.preformatted(tomli_w.dumps(run.config)))
        for number, run in enumerate(runs)
        if run.config
    ]
    return [f'<section class="card"><h2>Resolved config</h2>{"".join(folded)}</section>'] if folded else []


def _resource(name: str) -> str:
    return resources.files("titan_report").joinpath(name).read_text(encoding="utf-8")
