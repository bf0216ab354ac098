"""Charts as plotly.js figures, and the colours of runs in them.

Colours are names of style variables (``"@run-0"``, ``"@muted"``, ``"@run-0/0.4"`` with an opacity), which the page's script
resolves for the current colour scheme. A run has the same colour in every chart; colours are distinct under the common
colour vision deficiencies.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import Any

from titan_report.charts import Chart, Curve
from titan_report.expert_map import ExpertMap
from titan_report.goodput import TimeByCause
from titan_report.shown import clock
from titan_report.timeline import Kind, Moment, Timeline

Figure = dict[str, Any]
"""A plotly figure (``data`` and ``layout``), or a part of one."""

SYMBOLS: Mapping[Kind, tuple[str, str]] = {
    "start": ("triangle-right", "@text"),
    "restart": ("triangle-right", "@text"),
    "stage": ("triangle-right-open", "@text"),
    "checkpoint": ("line-ns-open", "@text"),
    "finding": ("diamond", "@warn"),
    "rewind": ("triangle-left", "@warn"),
    "end": ("square", "@text"),
    "kill": ("x", "@bad"),
    "now": ("circle-open", "@text"),
}
"""Marker symbol and colour of each kind of moment."""


_SYMBOLS_OF_ROUNDS = ("circle", "circle-open", "square", "square-open")


def chart_figure(chart: Chart, names: Sequence[str]) -> Figure:
    """Return the figure of a chart over steps."""
    several = len({curve.run for curve in chart.curves}) > 1
    if chart.stacked:
        data = [_layer(curve, number, len(chart.curves), chart) for number, curve in enumerate(chart.curves)]
    else:
        data = [_line(curve, chart, names, several) for curve in chart.curves]
    y_axis: dict[str, Any] = {"rangemode": "tozero" if chart.from_zero else "normal", "tickformat": _ticks(chart)}
    known = {value for curve in chart.curves for value in curve.values if value is not None}
    if chart.name == "data_shares":
        y_axis["range"] = [0, 1]
    elif len(known) == 1:  # plotly's default is value - 1 to value + 1, however small the value is
        (value,) = known
        y_axis["range"] = sorted((0, 1.5 * value)) if value else [-1, 1]
    steps = [step for curve in chart.curves for step in (curve.steps[0], curve.steps[-1])]
    first, last = min(steps), max(steps)
    layout = _layout(
        xaxis={
            "range": [first, last] if first < last else [first - 1, last + 1],
            "title": {"text": "step", "font": {"size": 11, "color": "@muted"}, "standoff": 6},  # page.js changes the axis
            "tickformat": ",d",
        },
        yaxis=y_axis,
    )
    return {"data": data, "layout": layout}


def timeline_figure(timeline: Timeline) -> Figure:
    """Return the figure of a timeline: a bar for each attempt and a marker for each moment."""
    run = timeline.run
    bars_x: list[str | None] = []
    for attempt in timeline.attempts:
        bars_x += [_on_axis(attempt.began), _on_axis(attempt.last), None]
    bars = {
        "type": "scatter", "mode": "lines", "x": bars_x, "y": [None if x is None else 0 for x in bars_x],
        "line": {"color": f"@run-{colour_of(run)}/0.45", "width": 14}, "hoverinfo": "skip", "meta": {"run": run},
        "name": "attempts",
    }  # fmt: skip
    kinds = dict.fromkeys(moment.kind for moment in timeline.moments)
    markers = [_markers(kind, [moment for moment in timeline.moments if moment.kind == kind], run) for kind in kinds]
    layout = _layout(
        xaxis={"type": "date", "nticks": 6},
        yaxis={"visible": False, "range": [-1, 1], "fixedrange": True},
        hovermode="closest",
        left=10,
    )
    return {"data": [bars, *markers], "layout": layout}


def time_figure(spent: TimeByCause, run: int) -> Figure:
    """Return the figure of the time by cause: a stacked bar for each attempt, the first one on top, in hours of all
    ranks."""
    names = [f"attempt {number}" for number in range(1, len(spent.attempts) + 1)]
    bars = [
        {
            "type": "bar", "orientation": "h", "name": cause, "meta": {"run": run}, "y": names,
            "x": [attempt.seconds.get(cause, 0.0) / 3600 for attempt in spent.attempts],
            "marker": {"color": "@{}/{:.2f}".format(*OF_CAUSES[cause]), "line": {"width": 0}},
            "hovertemplate": f"{cause}: %{{x:.3~g}} h<extra></extra>",
        }
        for cause in spent.seconds
    ]  # fmt: skip
    font = {"size": 11, "color": "@muted"}
    layout = _layout(
        xaxis={"type": "linear", "title": {"text": "hours of all ranks", "font": font, "standoff": 6}},
        yaxis={"type": "category", "autorange": "reversed", "nticks": 12},
        hovermode="closest",
    )
    return {"data": bars, "layout": {**layout, "barmode": "stack"}}


def expert_figure(found: ExpertMap) -> Figure:
    """Return the heat map: experts to the right, blocks downwards; the mean has the colour of the page."""
    most = max(2.0, *(share for row in found.shares for share in row))
    colour = f"@run-{colour_of(found.run)}"
    cells = {
        "type": "heatmap", "z": found.shares, "y": [str(block) for block in found.blocks], "meta": {"run": found.run},
        "x": [str(expert) for expert in range(len(found.shares[0]))], "zmin": 0, "zmax": most, "xgap": 1, "ygap": 1,
        "colorscale": [[0, "@bad/0.7"], [1 / most, "@card"], [1, colour]],
        "colorbar": {"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 11, "color": "@muted"}},
        "hovertemplate": "block %{y}, expert %{x}: %{z:.2f}<extra></extra>",
    }  # fmt: skip
    axis = {"type": "category", "showgrid": False}
    font = {"size": 11, "color": "@muted"}
    layout = _layout(
        xaxis={**axis, "nticks": 16, "title": {"text": "expert", "font": font, "standoff": 6}},
        yaxis={**axis, "autorange": "reversed", "title": {"text": "block", "font": font}},
        hovermode="closest",
    )
    return {"data": [cells], "layout": layout}


def _line(curve: Curve, chart: Chart, names: Sequence[str], several: bool) -> Figure:
    label = names[curve.run] if several else ""
    if curve.label != chart.title.lower() and len({each.label for each in chart.curves}) > 1:
        label = f"{label} {curve.label}".strip()
    colour = f"@run-{colour_of(curve.run)}"
    trace: Figure = {
        "type": "scatter", "x": curve.steps, "y": curve.values, "name": _plain(label or curve.label),
        "meta": {"run": curve.run}, "hovertemplate": f"%{{y:{chart.form}}}", "mode": "lines",
    }  # fmt: skip
    dash = dash_of(curve.run)
    if curve.style == "dots":
        trace |= {"mode": "lines+markers", "cliponaxis": False}
        trace["line"] = {"color": f"{colour}/0.6", "width": 1.2, "dash": "dot"}
        edge = {"color": "@card", "width": 1.5}
        trace["marker"] = {"color": colour, "size": 7, "line": edge, "symbol": _SYMBOLS_OF_ROUNDS[round_of(curve.run)]}
    elif curve.style == "marks":
        symbol, mark = SYMBOLS["rewind"]
        trace |= {"mode": "markers", "cliponaxis": False, "text": [_plain(text) for text in curve.texts]}
        trace |= {"hovertemplate": "%{text}<extra></extra>"}
        trace["marker"] = {"color": mark, "size": 11, "symbol": symbol, "line": {"color": colour, "width": 1.5}}
    elif curve.style == "faint":
        trace["line"] = {"color": f"{colour}/0.35", "width": 1, "dash": dash}
    else:
        trace["line"] = {"color": colour, "width": 1.8, "dash": dash}
        known = sum(value is not None for value in curve.values)
        if known == 1:  # a line through one point is invisible
            trace |= {"mode": "markers", "marker": {"color": colour, "size": 6}}
    return trace


def _layer(curve: Curve, number: int, of: int, chart: Chart) -> Figure:
    colour = f"@run-{colour_of(curve.run)}"
    return {
        "type": "scatter", "mode": "lines", "x": curve.steps, "y": curve.values, "name": _plain(curve.label),
        "stackgroup": "all", "line": {"color": colour, "width": 0.6}, "meta": {"run": curve.run},
        "fillcolor": f"{colour}/{tint_of(number, of):.2f}", "hovertemplate": f"%{{y:{chart.form}}}",
    }  # fmt: skip


def _markers(kind: Kind, moments: Sequence[Moment], run: int) -> Figure:
    symbol, colour = SYMBOLS[kind]
    return {
        "type": "scatter", "mode": "markers", "name": kind, "meta": {"run": run},
        "x": [_on_axis(moment.time) for moment in moments], "y": [0] * len(moments),
        "text": [_hover(moment) for moment in moments], "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "symbol": symbol, "color": colour, "size": 14 if kind == "checkpoint" else 11,
            "line": {"color": colour if kind in ("checkpoint", "now") else "@card", "width": 1.5},
        },
    }  # fmt: skip


def _hover(moment: Moment) -> str:
    step = "" if moment.step is None else f", step {moment.step:,}"
    return f"{clock(moment.time)}{step}<br>{_plain(moment.text)}"


def _layout(xaxis: Figure, yaxis: Figure, hovermode: str = "x unified", left: int = 44) -> Figure:
    grid = {
        "gridcolor": "@grid", "linecolor": "@border", "zeroline": False, "automargin": True,
        "tickfont": {"size": 11, "color": "@muted"}, "ticks": "",
    }  # fmt: skip
    return {
        "paper_bgcolor": "@card",
        "plot_bgcolor": "@card",
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12, "color": "@text"},
        "hoverlabel": {"bgcolor": "@card", "bordercolor": "@border", "font": {"color": "@text", "size": 12}},
        "margin": {"l": left, "r": 12, "t": 8, "b": 36},
        "showlegend": False,
        "hovermode": hovermode,
        "xaxis": {**grid, "showgrid": False, "showline": True, **xaxis},
        "yaxis": {**grid, "nticks": 6, **yaxis},
        "uirevision": "keep",
    }


def _ticks(chart: Chart) -> str:
    """Return the format of tick labels. They are round numbers, which need fewer digits than values."""
    return {".1%": ".0%", ",.0f": "~s"}.get(chart.form, "~g")


def _on_axis(seconds: float) -> str:
    """Return a date for plotly in local time. plotly has no time zones and shows dates as written."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"


def _plain(text: str) -> str:
    """Escape ``text``, because plotly interprets tags such as ``<b>``."""
    return html.escape(text, quote=False)


LIGHT = ("#1f6fb4", "#c9540a", "#6b2450", "#2aa693", "#d8b018", "#b09af0")
"""For a light page. Any two differ by at least 20 in CIELAB, also under simulated protanopia, deuteranopia and tritanopia
(Machado et al., 2009), because they differ in lightness too."""
DARK = ("#5aa9f0", "#f2803a", "#c25b9e", "#5fd9bf", "#f4e08a", "#d3c9ff")
"""The same colours for a dark page. Any two differ by at least 17."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""If there are more runs than colours, the colours repeat in further rounds with another dash and another marker."""
TINTS = (0.28, 0.5, 0.95, 0.7, 0.12)
"""Opacities of stacked parts, in the run's colour. The first part is the largest and gets a subdued tint."""

OF_CAUSES: Mapping[str, tuple[str, float]] = {
    "steps": ("run-0", 1.0),
    "lost": ("run-1", 1.0),
    "start": ("run-2", 1.0),
    "restart": ("run-2", 0.5),
    "compile": ("run-3", 1.0),
    "data": ("run-1", 0.45),
    "save": ("run-4", 1.0),
    "evaluation": ("run-5", 1.0),
    "idle": ("muted", 0.45),
    "not recorded": ("muted", 0.2),
}
"""Colour and opacity of each cause: nine tints of one colour could not be told apart."""


def colour_of(run: int) -> int:
    """Return the index of a run's colour."""
    return run % len(LIGHT)


def round_of(run: int) -> int:
    """Return the round of colours that a run belongs to, from 0."""
    return run // len(LIGHT) % len(DASHES)


def dash_of(run: int) -> str:
    """Return the dash of a run's lines."""
    return DASHES[round_of(run)]


def tint_of(part: int, parts: int) -> float:
    """Return the opacity of part number ``part`` of ``parts`` stacked parts."""
    if parts <= len(TINTS):
        return TINTS[part]
    return 0.12 + 0.83 * part / (parts - 1)
