"""Renders a run on one screen of the terminal, with curves of braille characters, which have two by four dots."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from titan_core.toolkit.text import format_mfu, is_estimated, printable
from titan_report.attempts import State, describe_end
from titan_report.followed_run import FollowedRun
from titan_report.goodput import goodput_line
from titan_report.shown import UNKNOWN, duration, figure, finite
from titan_report.stacks import TIME_PARTS
from titan_report.summary import model_of
from titan_report.timeline import Moment, moments_of

_COLOURS: dict[State, str] = {
    "running": "green",
    "finished": "blue",
    "ended": "blue",
    "preempted": "yellow",
    "interrupted": "yellow",
    "stalled": "yellow",
    "killed": "red",
    "failed": "red",
}
_ABOVE_CHARTS = 11
"""Number of lines of the head, the progress bar and the metrics."""
_LEAST_CHART = 4
"""Smallest height of a chart in lines: the title, two lines of the curve, and the steps."""
_TWO_CHARTS = 64
"""Smallest width at which two charts fit side by side."""


def frame(run: FollowedRun, width: int, height: int) -> RenderableType:
    """Return the view of ``run``, in at most ``height`` lines of ``width`` characters."""
    if not run.exists:
        return Text(f"waiting for a run in {run.path}", style="dim", overflow="ellipsis", no_wrap=True)
    state = run.state()
    room = height - _ABOVE_CHARTS
    moments = [moment for moment in moments_of(run.events, run.attempts, state)[0] if moment.kind != "now"]
    events = max(0, min(len(moments), 1000, (room - _LEAST_CHART) // 3 + 1))
    chart_height = room - events - 1 if events else room
    parts: list[RenderableType] = [_head(run, state), _bar(run, state), "", _figures(run), ""]
    if chart_height >= _LEAST_CHART and run.last:
        parts.append(_charts(run, width, chart_height))
    if events and room >= events + 1:
        parts += ["", *(_event(moment) for moment in moments[-events:])]
    return Group(*parts)


def _head(run: FollowedRun, state: State | None) -> RenderableType:
    name = Text(printable(run.path.resolve().name), style="bold", overflow="ellipsis", no_wrap=True)
    name.append(printable(f"  {model_of(run.config, run.events)}"), style="not bold dim")
    described = UNKNOWN if state is None else printable(describe_end(run.attempts[-1], state))
    status = Text(described, no_wrap=True, overflow="ellipsis")
    if state is not None:
        status.stylize(_COLOURS[state])
    if state == "stalled":
        status.append(f"; no output for {duration(run.quiet())}")
    if run.attempts and run.attempts[-1].stage:
        status.append(printable(f", stage {run.attempts[-1].stage!r}"), style="dim")
    if (number := sum(not attempt.planned for attempt in run.attempts)) > 1:
        status.append(f", attempt {number}", style="dim")
    if back := sum(event["event"] == "rewind" for event in run.events):
        status.append(f", went back {back} time{'' if back == 1 else 's'}", style="yellow")
    if run.damaged:
        status.append(f", {run.damaged} damaged lines", style="yellow")
    return _row(name, status)


def _bar(run: FollowedRun, state: State | None) -> RenderableType:
    done = max([run.last.get("step", 0), *(event["step"] for event in run.events)])
    steps = run.attempts[-1].start.get("steps") if run.attempts else None
    if not steps:
        return Text(f"step {done:,}")
    left = run.seconds_left() if state == "running" else None
    if left is not None:
        remaining = f"{duration(left)} left"
    elif state in ("running", "stalled"):
        remaining = ""
    else:
        remaining = f"took {duration(sum(attempt.seconds for attempt in run.attempts))}"
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    bar = ProgressBar(total=steps, completed=done, complete_style="cyan", finished_style="blue")
    grid.add_row(f"step {done:,}/{steps:,}", bar, f"{done / steps:.0%}", remaining)
    return grid


def _figures(run: FollowedRun) -> RenderableType:
    last, validation = run.last, run.validation
    known = finite(validation.get("validation_loss"))
    at = "" if known is None else f" at {validation['step']:,}, best {figure(run.best_validation, '.4f')}"
    left = [
        ("loss", _loss(last)),
        ("grad norm", figure(last.get("grad_norm"), ".4g")),
        ("lr", figure(last.get("lr"), ".3g")),
        ("validation", figure(known, ".4f") + at),
        ("trained on", f"{figure(last.get('tokens_seen'), ',.0f')} tokens" + _more(last, "epoch", ", epoch {:.0f}")),
    ]
    right = [
        ("tokens/s", figure(last.get("tokens_per_second"), ",.0f")),
        ("per device", figure(last.get("tokens_per_second_per_device"), ",.0f") + _more(last, "tflops", ", {:.3g} TFLOP/s")),
        ("MFU", UNKNOWN if (mfu := finite(last.get("mfu"))) is None else format_mfu(mfu, is_estimated([last]))),
        (
            "memory",
            f"{figure(last.get('memory_peak_gib'), '.2f')} GiB peak"
            + _more(last, "memory_reserved_gib", ", {:.2f} reserved"),
        ),
        (
            "step time",
            f"{figure(last.get('step_seconds'), '.3f')} s"
            + _more(last, "corrupt_records", ", {:.0f} corrupt", zero=False)
            + _more(last, "empty_documents", ", {:.0f} empty", zero=False),
        ),
    ]
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for ratio in (None, 1, None, 1):
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio, style="" if ratio else "dim")
    for (left_label, left_value), (right_label, right_value) in zip(left, right, strict=True):
        grid.add_row(left_label, left_value, right_label, right_value)
    goodput = Text("goodput     ", style="dim", no_wrap=True, overflow="ellipsis").append(
        goodput_line(run.spent), style="not dim"
    )
    return Group(grid, _split(last), goodput)


def _loss(last: Mapping[str, Any]) -> str:
    """Return the mean loss, and the highest of any rank if it differs."""
    mean, highest = (figure(last.get(key), ".4f") for key in ("loss", "loss_max"))
    return mean if highest in (mean, UNKNOWN) else f"{mean}, at most {highest}"


def _more(record: Mapping[str, Any], key: str, form: str, zero: bool = True) -> str:
    """Return one more formatted value; empty if it is not known."""
    value = finite(record.get(key))
    return "" if value is None or (not zero and value == 0) else form.format(value)


def _split(last: Mapping[str, Any]) -> Text:
    """Return the shares of the step time."""
    whole = finite(last.get("step_seconds"))
    parts = [(label, finite(last.get(key))) for label, key in TIME_PARTS]
    shares = ", ".join(f"{label} {value / whole:.0%}" for label, value in parts if whole and value is not None)
    return Text(f"time in     {shares}" if shares else "", no_wrap=True, overflow="ellipsis")


def _charts(run: FollowedRun, width: int, height: int) -> RenderableType:
    if width < _TWO_CHARTS:
        return _chart("loss", run, "loss", width, height, ".2f", from_zero=False)
    half = width // 2 - 1
    return _row(
        _chart("loss", run, "loss", half, height, ".2f", from_zero=False),
        _chart("tokens/s", run, "tokens_per_second", half, height, ",.0f", from_zero=True),
    )


def _chart(title: str, run: FollowedRun, key: str, width: int, height: int, form: str, from_zero: bool) -> Text:
    """Return a title, a curve with its smallest and largest value, and the first and last step."""
    records = run.steps.records
    steps, values = [record["step"] for record in records], [finite(record.get(key)) for record in records]
    found = bounds(values, from_zero)
    if found is None:
        return Text(f"{title}: no value yet", style="dim")
    bottom, top = found
    labels = format(top, form), format(bottom, form)
    margin = max(map(len, labels))
    columns = max(1, width - margin - 2)
    lines = plot(steps, values, columns, height - 2, bottom, top)
    text = Text(no_wrap=True, overflow="crop")
    text.append(" " * (margin + 1) + title + "\n", style="dim")
    for number, line in enumerate(lines):
        label = labels[0] if number == 0 else labels[1] if number == len(lines) - 1 else ""
        text.append(label.rjust(margin) + " ", style="dim")
        text.append(line + "\n", style="cyan")
    first, last = f"{steps[0]:,}", f"{steps[-1]:,}"
    text.append(" " * (margin + 1) + first + last.rjust(max(0, columns - len(first))), style="dim")
    return text


def _event(moment: Moment) -> Text:
    style = {"finding": "yellow", "rewind": "yellow", "kill": "red"}.get(moment.kind, "")
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(time.strftime("%m-%d %H:%M:%S", time.localtime(moment.time)), style="dim")
    text.append("" if moment.step is None else f"  step {moment.step:,}", style="dim")
    text.append(printable(f"  {' '.join(moment.text.split())}"), style=style)
    return text


def _row(left: RenderableType, right: RenderableType) -> RenderableType:
    """Return a row with one element at each edge."""
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right" if isinstance(right, Text) and "\n" not in right.plain else "left", no_wrap=True)
    grid.add_row(left, right)
    return grid


_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot, by row and column in the character."""
_BLANK = 0x2800


def plot(
    steps: Sequence[int], values: Sequence[float | None], columns: int, rows: int, bottom: float, top: float
) -> list[str]:
    """Return the curve through the points, as ``rows`` lines of ``columns`` characters.

    Args:
        steps: ascending; the first is at the left edge, the last at the right.
        values: one per step; ``None`` is a gap.
        bottom: the value at the lower edge.
        top: the value at the upper edge.
    """
    width, height = 2 * columns, 4 * rows
    span = max(1, steps[-1] - steps[0]) if steps else 1
    value_range = (top - bottom) or 1.0
    cells = [[_BLANK] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for step, value in zip(steps, values, strict=True):
        if value is None:
            before = None
            continue
        share = min(1.0, max(0.0, (value - bottom) / value_range))
        here = (round((step - steps[0]) / span * (width - 1)), round((1 - share) * (height - 1)))
        for x, y in _line(before or here, here):
            cells[y // 4][x // 2] |= _BITS[y % 4][x % 2]
        before = here
    return ["".join(map(chr, row)) for row in cells]


def _line(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a connected line between two points."""
    across, down = end[0] - begin[0], end[1] - begin[1]
    count = max(abs(across), abs(down), 1)
    return [(begin[0] + round(across * n / count), begin[1] + round(down * n / count)) for n in range(count + 1)]


def bounds(values: Sequence[float | None], from_zero: bool) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value; ``None`` if there is none. ``from_zero`` includes 0."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return (min(0.0, *known) if from_zero else min(known)), max(known)
