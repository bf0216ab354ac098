"""Writes the charts as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import UserError
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.charts import Chart, Curve, line_charts
from titan_report.names import distinct_names
from titan_report.palette import LIGHT, colour_of, dash_of, round_of, tint_of
from titan_report.stacks import stacks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_INK, _MUTED, _GRID = "#202124", "#6a6c72", "#eeedea"
_NAN = float("nan")


def write_plots(runs: Sequence[RunLog], folder: Path) -> list[Path]:
    """Write each chart that is not empty to ``folder``; return the files.

    Raises:
        UserError: ``folder`` cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = distinct_names([run.path for run in runs])
    files = []
    for name, group in groupby([*line_charts(runs), *stacks(runs)], key=lambda chart: chart.name):
        charts = list(group)  # one, or one per run for stacked charts
        figure = Figure(figsize=(8, 4.2 if len(charts) == 1 else 3 * len(charts)), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)  # never opens a window
        for chart, axes in zip(charts, figure.subplots(len(charts), squeeze=False)[:, 0], strict=True):
            _draw(axes, chart, names)
        file = folder / f"{name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(file)
        except OSError as error:
            raise UserError.one(str(file), f"cannot be written: {error.strerror}", "name another folder") from None
        files.append(file)
    return files


def _draw(axes: Axes, chart: Chart, names: Sequence[str]) -> None:
    if chart.stacked:
        _draw_stack(axes, chart)
    else:
        for curve in chart.curves:
            axes.plot(curve.steps, _gaps(curve), **_style(curve, chart, names))
    unit = f" ({chart.unit})" if chart.unit else ""
    of_run = f": {_plain(names[chart.curves[0].run])}" if chart.stacked and len(names) > 1 else ""
    axes.set_title(f"{chart.title}{unit}{of_run}", loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("step", color=_MUTED, fontsize=9)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.name == "data_shares":
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter("{x:.0%}")
    if len(chart.curves) > 1:
        beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if chart.stacked else {}
        axes.legend(frameon=False, fontsize=9, labelcolor=_INK, reverse=chart.stacked, **beside)


def _draw_stack(axes: Axes, chart: Chart) -> None:
    first, of = chart.curves[0], len(chart.curves)
    axes.stackplot(
        first.steps,
        *([value or 0.0 for value in curve.values] for curve in chart.curves),
        labels=[_plain(curve.label) for curve in chart.curves],
        colors=[(LIGHT[colour_of(first.run)], tint_of(number, of)) for number in range(of)],
        linewidth=0,
    )
    axes.margins(x=0)


def _style(curve: Curve, chart: Chart, names: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments of matplotlib for a curve."""
    several = len({each.run for each in chart.curves}) > 1
    parts = [names[curve.run]] if several else []
    if len({each.label for each in chart.curves}) > 1 or not several:
        parts.append(curve.label)
    style: dict[str, Any] = {"color": LIGHT[colour_of(curve.run)], "label": _plain(", ".join(parts))}
    if curve.style == "dots":
        return {**style, "marker": "osDv"[round_of(curve.run)], "markersize": 4, "linestyle": ":", "linewidth": 1}
    if curve.style == "faint":
        return {**style, "alpha": 0.35, "linewidth": 0.8}
    single = sum(value is not None for value in curve.values) == 1
    return {**style, "linestyle": _DASHES[dash_of(curve.run)], "linewidth": 1.4, "marker": "o" if single else None}


def _gaps(curve: Curve) -> list[float]:
    return [_NAN if value is None else value for value in curve.values]


def _plain(text: str) -> str:
    """Escape ``text``: matplotlib interprets ``$`` as mathematics, and omits labels that begin with ``_``."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")
