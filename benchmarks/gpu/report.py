"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.cases import BASELINE

_COLUMNS = (
    "configuration",
    "tokens/s",
    f"vs {BASELINE}",
    "MFU",
    "peak GiB",
    "reserved GiB",
    "step ms",
    "host ms",
    "first step s",
)
_PREDICTED = ("step / predicted", "peak / predicted")


def markdown(report: dict[str, Any]) -> str:
    """Return the whole report."""
    return "\n".join([*_head(report), "", *_tests(report["tests"]), "", *table_of(report), "", *_notes(report)]) + "\n"


def table_of(report: dict[str, Any]) -> list[str]:
    """Return the table of a report."""
    predictions = report.get("predictions")
    return table(report["rows"], predictions and predictions["rows"])


def table(rows: list[dict[str, Any]], predicted: Mapping[str, Any] | None = None) -> list[str]:
    """Return the table of configurations. A failed one has its reason in place of figures.

    Args:
        predicted: by configuration (:mod:`benchmarks.gpu.predict`); adds columns with measured / predicted.
    """
    columns = _COLUMNS if predicted is None else (*_COLUMNS, *_PREDICTED)
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    base = next((row["result"]["tokens_per_second"] for row in rows if row["name"] == BASELINE and row["result"]), None)
    for row in rows:
        result = row["result"]
        if result is None:
            lines.append(f"| {row['name']} | {row['failure'].replace('|', '/')} |{' |' * (len(columns) - 2)}")
            continue
        speed = result["tokens_per_second"]
        cells = [
            row["name"],
            f"{speed:,.0f}",
            _or_dash(base and speed / base, "{:.3f}"),
            _or_dash(result["mfu"], "{:.1%}"),
            f"{result['peak_gib']:.2f}",
            _or_dash(result["reserved_gib"], "{:.2f}"),
            f"{1000 * result['step_seconds']:.1f}",
            f"{1000 * result['host_seconds']:.1f}",
            f"{result['first_step_seconds']:.1f}",
        ]
        if predicted is not None:
            of_row = predicted.get(row["name"])
            for key in ("step_seconds", "peak_gib"):
                cells.append(_or_dash(of_row and result[key] / of_row[key], "{:.3f}"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _or_dash(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


def _head(report: dict[str, Any]) -> list[str]:
    machine = report["machine"]
    gpu = "a CPU"
    if "gpu" in machine:
        gpu = (
            f"{machine['gpu']} ({machine['gpu_memory_gib']} GiB), driver {machine['driver']} (CUDA {machine['driver_cuda']})"
        )
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        "# Titan on one GPU",
        "",
        f"{report['date']}, on {gpu}; {machine['cpu']}; Python {machine['python']}; {packages}.",
        f"Commit {machine['commit']}. `{report['command']}` took {report['seconds']:.0f} s.",
    ]
    if report["toy"]:
        lines.append("The model is a toy: these figures show that the benchmark works, and nothing about speed.")
    return lines


def _tests(tests: dict[str, Any] | None) -> list[str]:
    if tests is None:
        return ["Tests were not run."]
    failed, skipped = tests["failed"], tests["skipped"]
    counts = f"{tests['passed']} passed, {len(failed)} failed, {len(skipped)} skipped"
    lines = [f"Tests (`pytest -m gpu`, {tests['seconds']:.0f} s): {counts}."]
    lines += [f"* {tests['problem']}"] if tests["problem"] else []
    lines += [f"* failed: `{name}`: {message}" for name, message in failed.items()]
    lines += [f"* skipped: `{name}`: {message}" for name, message in skipped.items()]
    return lines


def _notes(report: dict[str, Any]) -> list[str]:
    plan = report["plan"]
    settings = plan["settings"]
    about = f"`{plan['recipe']}`, {settings['training.seq_len']} tokens x {settings['training.local_batch_size']}"
    if "model.args.n_layers" in settings:
        about += f", {settings['model.args.n_layers']} layers"
    lines = [
        f"Model and batch: {about}; {plan['warmup']} steps of warmup, {plan['steps']} measured, {plan['probes']} probes.",
        "MFU is relative to the bf16 peak of the data sheet, also in float8.",
        "`host ms` is the time until a step returns, with an idle device before it.",
        "`first step s` counts from the start of the process. The first compiled configuration of each kind (bare loop,",
        "titan, torchtitan) finds nothing compiled.",
    ]
    if predictions := report.get("predictions"):
        lines.append(f"Predicted for `{predictions['device']}` by commit {predictions['commit']}, {predictions['date']}.")
    lines += [f"* not run: {name}: {why}" for name, why in report["left_out"].items()]
    return lines
