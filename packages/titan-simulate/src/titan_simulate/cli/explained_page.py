"""The page of ``titan estimate --explain-html``: one file, without scripts, that loads nothing. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from titan_core.api import UserError
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.text import show_count
from titan_simulate.cli.explain import kind_of, operator_of
from titan_simulate.cli.icicle import Node, icicle

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate
    from titan_simulate.estimate.explain import Explanation

OPTION = "--explain-html"
PHASES = ("forward", "recomputation", "backward")
"""In the order of a step."""
_STYLES = {
    "matmul": "c0", "attention": "c2", "pointwise": "c3", "exposed communication": "c1", "host": "c4",
    "copy to or from the host": "c5", "pipeline idle": "c6",
    "parameters": "c0", "gradients": "c3", "optimizer state": "c2", "activations": "c1", "logits and loss": "c4",
    "gathered parameters": "c5", "communication": "c7",
}  # fmt: skip
"""Kind of work, or owner of memory -> its class in the style sheet. All others are grey."""
SHOWN = 0.0005
"""Least share of what the key below a bar lists."""
_NUMBERS = ("ranks", "calls", "GiB", "ms", "exposed ms")
"""Columns of numbers."""


def write_page(file: Path, found: Estimate, explanation: Explanation, recipe: str, capacity: float) -> None:
    """Write the :func:`page`.

    Raises:
        UserError: ``file`` cannot be written.
    """
    try:
        with atomic_write(file) as part:
            part.write_text(page(found, explanation, recipe, capacity), encoding="utf-8")
    except OSError as error:
        raise UserError.one(f"{OPTION} {file}", f"cannot be written: {error.strerror}", "choose another file") from None


def page(found: Estimate, explanation: Explanation, recipe: str, capacity: float) -> str:
    """Return the page.

    Args:
        recipe: name of the recipe, and of its stage.
        capacity: GiB of a device.
    """
    title = f"{recipe} on {show_count(found.world_size)} x {found.device}"
    fits = "" if found.fits else ' <strong class="bad">does not fit</strong>'
    figures = {
        "step": _seconds(found.step_seconds),
        "tokens/s per device": f"{found.tokens_per_second_per_gpu:,.0f}",
        "MFU": f"{found.mfu:.1%}",
        f"of {capacity:.1f} GiB": f"{found.peak_gib:.1f}",
    }
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures.items())
    body = [
        f'<h1>{escape(title)}</h1><p class="note">estimated; {escape(found.mesh)}{fits}</p><div class="tiles">{tiles}</div>',
        _time(found, explanation),
        _memory(found, explanation, capacity),
        _collectives(explanation) if explanation.collectives else "",
        _rows(explanation),
    ]
    style = resources.files("titan_simulate").joinpath("cli/explained_page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{style}</style>",
    ]
    lines = ["<!doctype html>", '<html lang="en"><head>', *head, "</head><body><main>", *body, "</main></body></html>", ""]
    return "\n".join(lines)


def _time(found: Estimate, explanation: Explanation) -> str:
    rows = [row for row in explanation.time if row.seconds > 0]  # differences of simulations may be a little below
    tree = Node("step")
    for row in rows:
        tree.add((row.phase, *_path(row.module), kind_of(row)), _style(row.kind), row.seconds)
    note = (
        f"Rank {explanation.rank}. Each instant counts once: for what computes, otherwise for copies, for communication, or "
        "for the host."
    )
    kinds = _sums((row.kind, row.seconds) for row in rows)
    return _card("Time of a step", note, _bar(kinds, found.step_seconds, _seconds) + icicle(tree, _seconds, PHASES))


def _memory(found: Estimate, explanation: Explanation, capacity: float) -> str:
    rows = [row for row in explanation.memory if row.gib > 0]
    tree = Node("peak")
    for row in rows:
        tree.add((row.owner, *_path(row.module)), _style(row.owner), row.gib)
    owners = _sums((row.owner, row.gib) for row in rows)
    bar = _bar(owners, found.peak_gib, _gib, max(capacity, found.peak_gib))
    note = f"Rank {found.rank}, in {found.moment}. The bar is the memory of the device."
    return _card("Memory at the peak", note, bar + icicle(tree, _gib))


def _path(module: str) -> list[str]:
    """Return the levels of a module: ``["model.layers.*", "attention", "wq"]``."""
    blocks, star, within = module.rpartition(".*")
    if star:
        return [blocks + star, *within.split(".")[1:]]
    return [] if module == "-" else module.split(".")


def _style(name: str) -> str:
    return _STYLES.get(name, "c6")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _gib(value: float) -> str:
    return f"{value:.3g} GiB" if value >= 0.1 else f"{1024 * value:.3g} MiB"


def _card(title: str, note: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}</section>'


def _sums(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum by name, the largest first."""
    found: dict[str, float] = {}
    for name, value in values:
        found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _bar(values: Mapping[str, float], whole: float, show: Callable[[float], str], length: float | None = None) -> str:
    """Return a bar, and below it what its colours mean.

    Args:
        whole: of which the shares are shown.
        length: of the bar, if that is longer.
    """
    x, cells, key = 0.0, [], []
    for name, value in values.items():
        width = 100 * value / (length or whole)
        cells.append(f'<rect class="{_style(name)}" x="{x:.3f}%" width="{width:.3f}%" height="22"/>')
        x += width
        if value >= SHOWN * whole:
            swatch = f'<svg width="11" height="11"><rect class="{_style(name)}" width="11" height="11" rx="3"/></svg>'
            key.append(f"<li>{swatch}{escape(name)} <b>{show(value)}</b> {value / whole:.1%}</li>")
    bar = f'<svg class="bar" width="100%" height="22"><rect class="free" width="100%" height="22"/>{"".join(cells)}</svg>'
    return f'{bar}<ul class="key">{"".join(key)}</ul>'


def _collectives(explanation: Explanation) -> str:
    most = max(row.seconds for row in explanation.collectives) or 1.0
    rows = []
    for row in explanation.collectives:
        long, exposed = (f"{100 * max(0.0, value) / most:.2f}%" for value in (row.seconds, row.exposed_seconds))
        bar = f'<rect class="hidden" width="{long}" height="12"/><rect class="c1" width="{exposed}" height="12"/>'
        cells = [row.module, operator_of(row.operator), row.group, f"{row.ranks}", f"{row.calls:,.0f}", f"{row.gib:,.2f}"]
        cells += [f"{1e3 * row.seconds:,.2f}", f"{1e3 * row.exposed_seconds:,.2f}"]
        rows.append([*map(escape, cells), f'<svg width="100%" height="12">{bar}</svg>'])
    headers = ("module", "collective", "group", "ranks", "calls", "GiB", "ms", "exposed ms", "")
    return _card("Collectives", "The strong part of a bar is exposed: nothing computes meanwhile.", _table(headers, rows))


def _rows(explanation: Explanation) -> str:
    times = [(row.module, row.phase, kind_of(row), f"{1e3 * row.seconds:,.4f}") for row in explanation.time]
    sizes = [(row.module, row.owner, f"{row.gib:,.4f}") for row in explanation.memory]
    tables: dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = {
        f"{len(times)} of the time": (("module", "phase", "kind of work", "ms"), times),
        f"{len(sizes)} of the memory": (("module", "owner", "GiB"), sizes),
    }
    details = (
        f"<details><summary>{name}</summary>{_table(headers, [[*map(escape, row)] for row in rows])}</details>"
        for name, (headers, rows) in tables.items()
    )
    return _card("All rows", "", "".join(details))


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already."""
    styles = [' class="number"' if header in _NUMBERS else "" for header in headers]

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{style}>{cell}</{tag}>" for cell, style in zip(cells, styles, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f'<div class="scroll"><table><thead><tr>{row(headers, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
