"""Builds the parts of the page, and escapes all text that comes from runs."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from titan_report.axes import Positions
from titan_report.charts import Chart
from titan_report.palette import DARK, LIGHT, colour_of, round_of, tint_of
from titan_report.shown import Table

_NUMBER = re.compile(r"~?[-+]?[\d,.]+([eE][-+]?\d+)?(%| GiB)?|–|not finite|[\d,]+ of [\d,]+")


def table(contents: Table, names: Sequence[str], lead: str = "", align_numbers: bool = True) -> str:
    """Return a table in a scrolling frame. Names of runs are shown with their colour.

    Args:
        names: the names of all runs.
        lead: a paragraph below the title.
        align_numbers: whether to right-align columns of numbers.
    """
    columns = list(zip(*contents.rows, strict=True)) or [() for _ in contents.headers]
    numeric = [align_numbers and bool(column) and all(map(_NUMBER.fullmatch, column)) for column in columns]
    classes = [' class="number"' if is_number else "" for is_number in numeric]
    head = "".join(
        f'<th scope="col"{kind}>{_cell(text, names if number else ())}</th>'
        for number, (text, kind) in enumerate(zip(contents.headers, classes, strict=True))
    )
    body = []
    for row in contents.rows:
        first = f'<th scope="row">{_cell(row[0], names)}</th>'
        rest = "".join(f"<td{kind}>{_escape(text)}</td>" for text, kind in zip(row[1:], classes[1:], strict=True))
        body.append(f"<tr>{first}{rest}</tr>")
    heading = f"<h2>{_escape(contents.title)}</h2>{paragraph(lead)}" if contents.title else ""
    rows = "\n".join(body)
    return (
        f'<section class="card">{heading}<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def chart_card(chart: Chart, names: Sequence[str], wide: bool) -> str:
    """Return the frame of a chart with its key. The page's script draws the chart into it."""
    identity = chart_id(chart)
    unit = f' <span class="unit">{_escape(chart.unit)}</span>' if chart.unit else ""
    of_run = f' <span class="of-run">{_cell(names[chart.curves[0].run], names)}</span>' if chart.stacked else ""
    shown = of_run if len(names) > 1 else ""
    only = f' data-of-run="{chart.curves[0].run}"' if chart.stacked else ""
    return (
        f'<figure class="card{" wide" if wide else ""}"{only}><figcaption><h3>{_escape(chart.title)}{unit}</h3>{shown}'
        f"{_key(chart)}{paragraph(chart.note)}</figcaption>"
        f'<div class="chart" id="{identity}"></div></figure>'
    )


def stack_key(parts: Mapping[str, tuple[str, float]]) -> str:
    """Return the key of stacked parts.

    Args:
        parts: variable of the style and opacity, by label.
    """
    swatches = (
        f'<li><i class="swatch" style="background: var(--{variable}); opacity: {opacity:.2f}"></i>{_escape(label)}</li>'
        for label, (variable, opacity) in parts.items()
    )
    return f'<ul class="key">{"".join(swatches)}</ul>'


def chart_id(chart: Chart) -> str:
    """Return the id of the element that the chart is drawn into."""
    return f"chart-{chart.name}-{chart.curves[0].run}" if chart.stacked else f"chart-{chart.name}"


def controls(names: Sequence[str], found: Sequence[Positions]) -> str:
    """Return the controls of the charts: the horizontal axis and, if there are several runs, a toggle for each.

    Args:
        found: positions of the steps of each run. An axis that is unknown for every run is not offered.
    """
    known = [(name, title) for name, title in _AXES if any(any(v is not None for v in run[name]) for run in found)]
    buttons = "".join(
        f'<button type="button" data-axis="{name}" aria-pressed="{str(name == "steps").lower()}">{title}</button>'
        for name, title in known
    )
    axes = f'<div class="axes" role="group" aria-label="Horizontal axis">{buttons}</div>' if len(known) > 1 else ""
    chips = "".join(
        f'<button type="button" class="chip" data-run="{number}" aria-pressed="true">{_cell(name, names)}</button>'
        for number, name in enumerate(names)
    )
    runs = f'<div class="chips" role="group" aria-label="Runs shown in the charts">{chips}</div>' if len(names) > 1 else ""
    return f'<div class="controls">{axes}{runs}</div>' if axes or runs else ""


_AXES = (("steps", "Steps"), ("tokens", "Tokens"), ("hours", "Time"))


def details(title: str, contents: str) -> str:
    """Return a section that is initially collapsed; ``contents`` is HTML."""
    return f"<details><summary>{title}</summary>{contents}</details>"


def preformatted(text: str) -> str:
    """Return ``text`` in a block that preserves its whitespace."""
    return f'<pre class="scroll">{_escape(text)}</pre>'


def name_of_run(number: int, names: Sequence[str]) -> str:
    """Return a run's name with its colour."""
    return _cell(names[number], names)


def paragraph(text: str) -> str:
    """Return a muted paragraph; empty without text."""
    return f'<p class="note">{_escape(text)}</p>' if text else ""


def palette_style() -> str:
    """Return the colours of runs as CSS variables."""
    light, dark = (" ".join(f"--run-{n}: {c};" for n, c in enumerate(colours)) for colours in (LIGHT, DARK))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def json_for_script(value: Any) -> str:
    """Return JSON that is safe in a script element: no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _key(chart: Chart) -> str:
    """Return the key of the curves; empty if they are all of one kind."""
    if chart.stacked:
        run, of = colour_of(chart.curves[0].run), len(chart.curves)
        return stack_key({curve.label: (f"run-{run}", tint_of(number, of)) for number, curve in enumerate(chart.curves)})
    kinds = {curve.label: curve.style for curve in reversed(chart.curves)}
    if len(kinds) < 2:
        return ""
    order = sorted(kinds.items(), key=lambda kind: ("line", "dots", "faint", "marks").index(kind[1]))
    items = "".join(f'<li><i class="stroke {style}"></i>{_escape(label)}</li>' for label, style in order)
    return f'<ul class="key">{items}</ul>'


def _cell(text: str, names: Sequence[str]) -> str:
    """Return ``text`` escaped, preceded by a dot in the run's colour if it is the name of a run."""
    if text not in names or len(names) < 2:
        return _escape(text)
    run = names.index(text)
    return f'<i class="dot round-{round_of(run)}" style="--run: var(--run-{colour_of(run)})"></i>{_escape(text)}'


def _escape(text: str) -> str:
    return html.escape(text)
