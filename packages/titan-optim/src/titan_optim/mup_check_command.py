"""``titan mup check``: the coordinate check of muP (arXiv 2203.03466, appendix D.1).

Models of several widths train for a few steps. With muP, activations change by as much in wide models as in narrow ones;
with the standard initial values and learning rates, they change more and more. The picture is an SVG with one panel for each
way to train.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from titan_core.api import CommandContext, Config, Run, StepReport, UserError, hookimpl
from titan_core.api.config.resolved import Override
from titan_core.toolkit.arguments import integer, json_argument
from titan_core.toolkit.atomic_write import atomic_write, require_writable
from titan_core.toolkit.text import print_json, print_table, say
from titan_optim.config import MUP_OPTIMIZER, MuPSection

MOST = 0.25
"""The largest exponent with which the change of activations may grow with the width: that of rounding and chance."""
EXIT_GROWS = 1
MUP, STANDARD = "muP", "standard"
_QUIET: Mapping[str, object] = {
    "metrics.enable_console": "false",
    "checkpoint.enable": "false",
    "sample.enable": "false",
    "validation.enable": "false",
    "lr_scheduler.name": "wsd",
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.decay_ratio": 0.0,
    "training.stop_at_step": "none",
}
"""A constant learning rate, and nothing beside training, as far as the installed packages have the keys."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan mup check``."""
    parser.add_argument("recipe", metavar="RECIPE|FILE", help="job with mup.base; its widths are not used")
    times = "widths to train, as multiples of mup.base (default: 1 2 4 8)"
    parser.add_argument("--times", type=integer(1, 1024), nargs="+", default=[1, 2, 4, 8], metavar="N", help=times)
    parser.add_argument("--steps", type=integer(1, 1000), default=5, metavar="N", help="steps to train (default: 5)")
    parser.add_argument("--to", metavar="FILE", default="mup.svg", help="picture to write (default: mup.svg)")
    json_argument(parser)


class Changes:
    """An observer that compares what modules return for fixed tokens after the last step with what they returned before the
    first: the mean absolute difference of their elements."""

    def __init__(self) -> None:
        self.changes: dict[str, float] = {}
        self._before: dict[str, Any] = {}

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Keep what they return now."""
        self._run, self._last = run, run.steps
        self._before = self._outputs()

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Compare, after the last step."""
        if report.step == self._last:
            after = self._outputs()
            self.changes = {name: (after[name] - before).abs().mean().item() for name, before in self._before.items()}

    def _outputs(self) -> dict[str, Any]:
        import torch

        (part,), batch, outputs = self._run.parts, self._run.job.batch, dict[str, Any]()
        layout = part.layout
        names = [*layout.embedding, *(f"{layout.blocks}.{number}" for number in range(layout.num_blocks)), layout.head[-1]]

        def keep(name: str) -> Any:
            return lambda module, given, returned: outputs.__setitem__(name, returned.detach().float())

        hooks = [part.module.get_submodule(name).register_forward_hook(keep(name)) for name in names]
        tokens = torch.arange(min(batch.seq_len, 64) * 4, device=self._run.world.device).view(4, -1) * 7919
        try:
            with self._run.evaluation(), torch.no_grad():
                part.module(tokens % layout.vocab_size)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs


def run(context: CommandContext) -> int:
    """Train, print the changes by width and the exponents with which they grow, and draw them.

    Raises:
        UserError: the recipe has no base model, fewer than two widths are given, or the picture cannot be written.
    """
    arguments = context.arguments
    times: list[int] = sorted(set(arguments.times))
    if len(times) < 2:
        raise UserError.one("--times", "growth needs at least two widths", "give several")
    base = context.config().section(MuPSection).base
    if not base:
        raise UserError(context.config().problem("mup.base", "is not set", "name the arguments of the base model"))
    require_writable(Path(arguments.to), f"--to {arguments.to}")
    logging.disable(
        logging.WARNING
    )  # what plugins notice about a run, such as that it saves nothing, is not meant for these
    changes = {kind: {factor: _train(context, base, factor, kind) for factor in times} for kind in (MUP, STANDARD)}
    growth = {kind: _growth(by_width) for kind, by_width in changes.items()}
    worst = max(growth[MUP].values())
    grows = worst > MOST
    with atomic_write(Path(arguments.to)) as part:
        part.write_text(picture(changes), encoding="utf-8")
    if arguments.json:
        print_json({"changes": changes, "growth": growth, "grows": grows, "picture": arguments.to})
    else:
        for kind, by_width in changes.items():
            rows = [
                (module, *(f"{by_width[factor][module]:.3g}" for factor in times), f"{exponent:+.2f}")
                for module, exponent in growth[kind].items()
            ]
            print_table((f"{kind}: change of", *(f"x {factor}" for factor in times), "grows by width ^"), rows)
            print()
        verdict = "with muP, activations change more in wide models" if grows else "with muP, no change grows with the width"
        say(f"{verdict} (largest exponent {worst:+.2f}, at most {MOST:+.2f} is expected); wrote {arguments.to}")
    return EXIT_GROWS if grows else 0


def _train(context: CommandContext, base: Mapping[str, int], factor: int, kind: str) -> dict[str, float]:
    """Return the changes of a model that is ``factor`` times as wide as the base model."""
    with tempfile.TemporaryDirectory(prefix="titan-mup-") as folder:
        values: dict[str, object] = {key: value for key, value in _QUIET.items() if _exists(context.config(), key)}
        values |= {f"model.args.{name}": value * factor for name, value in base.items()}
        values |= {"training.steps": context.arguments.steps, "job.dump_folder": folder}
        values |= {"optimizer.name": MUP_OPTIMIZER} if kind == MUP else {"mup.base": "{}", "optimizer.name": "AdamW"}
        job = context.job(1, more=[Override(key, str(value)) for key, value in values.items()])
        observer = Changes()
        context.train(job, [observer])
    return observer.changes


def _exists(config: Config, key: str) -> bool:
    section, _, field = key.partition(".")
    return any(cls.section == section and field in cls.model_fields for cls in config.sections)


def _growth(by_width: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the exponent with which the change of each module grows: the slope of its logarithm by that of the width."""
    x = [math.log(factor) for factor in by_width]
    modules = next(iter(by_width.values()))
    return {module: _slope(x, [math.log(max(one[module], 1e-30)) for one in by_width.values()]) for module in modules}


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the line with the least squares."""
    middle, height = sum(x) / len(x), sum(y) / len(y)
    return sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


WIDTH, HEIGHT, LEFT, TOP, GAP = 320, 240, 64, 40, 44
"""Sizes in pixels: of a panel, and of what is around it."""


def picture(changes: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """Return the SVG of ``changes``: kind of training -> width as a multiple of the base model -> module -> change."""
    values = [max(value, 1e-30) for by_width in changes.values() for of in by_width.values() for value in of.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    factors = list(next(iter(changes.values())))
    most = math.log(max(factors))

    def x(panel: int, factor: int) -> float:
        return LEFT + panel * (WIDTH + GAP) + WIDTH * math.log(factor) / most

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - math.log10(max(value, 1e-30))) / (high - low)

    modules = list(next(iter(next(iter(changes.values())).values())))
    parts = []
    for power in range(low, high + 1):
        parts.append(_text(LEFT - 8, y(10.0**power) + 4, f"1e{power}", "end"))
    for panel, (kind, by_width) in enumerate(changes.items()):
        left = x(panel, 1)
        parts.append(f'<rect x="{left:.1f}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>')
        parts.append(_text(left + WIDTH / 2, TOP - 14, kind, "middle"))
        parts += [_text(x(panel, factor), TOP + HEIGHT + 18, f"x {factor}", "middle") for factor in factors]
        for number, module in enumerate(modules):
            points = " ".join(f"{x(panel, factor):.1f},{y(of[module]):.1f}" for factor, of in by_width.items())
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{_color(number, len(modules))}" stroke-width="2"/>'
            )
    right = LEFT + len(changes) * (WIDTH + GAP)
    for number, module in enumerate(modules):
        line = TOP + 12 + 18 * number
        color = _color(number, len(modules))
        parts.append(
            f'<line x1="{right}" y1="{line - 4}" x2="{right + 20}" y2="{line - 4}" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(_text(right + 26, line, module, "start"))
    title = "Change of activations, by width as a multiple of the base model"
    parts.append(_text(LEFT, TOP + HEIGHT + 44, title, "start"))
    size = f'width="{right + 220}" height="{max(TOP + HEIGHT + 60, TOP + 24 + 18 * len(modules))}"'
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{background}\n{body}\n</svg>\n'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _color(number: int, of: int) -> str:
    """Return a color from blue, of the first module, to red, of the last."""
    return f"hsl({240 - 240 * number / max(of - 1, 1):.0f} 70% 45%)"
