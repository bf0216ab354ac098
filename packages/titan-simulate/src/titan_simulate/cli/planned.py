"""Prints the result of ``titan plan``."""

from __future__ import annotations

from typing import Any

from titan_core.api.config.sections import TrainingSection
from titan_core.toolkit.text import print_table, say, show_bytes
from titan_simulate.cli.planned_stage import StagedFigures
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.candidates import Candidate
from titan_simulate.plan.compose import GIB
from titan_simulate.plan.result import CLOSE, Finalist, Plan, describe, short


def compared(plan: Plan) -> str:
    """Return what was compared, and how."""
    return f"{plan.candidates:,} candidates compared, {plan.estimated} of them by estimate"


def unfinished(plan: Plan, out: str | None) -> str:
    """Return why a plan says nothing about the fastest candidate."""
    wrote = "" if out is None else f"; {out} is not written"
    text = f"NOT COMPLETE: {plan.stopped} ended the comparison after {plan.estimated} of {plan.wanted} estimates"
    return f"{text}. Faster candidates may be among the others{wrote}"


def proved(plan: Plan) -> str:
    """Return what is known of the kinds of blocks that were not traced."""
    excluded = plan.kinds - plan.traced - plan.open
    text = f"{plan.kinds:,} kinds of blocks: {plan.traced} traced, {excluded:,} excluded"
    if not plan.open:
        return f"{text}; no job is faster by more than {CLOSE:.0%}, or none fits"
    most = f"by {plan.unproved:.0%} at most" if plan.unproved < 1.0 else "by how much is not known"
    expected = ", which is not expected" if plan.unexpected else ""
    return f"{text}, {plan.open:,} open: they may be faster, {most}{expected} (--time-limit traces more)"


def summary(one: Finalist) -> str:
    """Return memory and speed of a finalist."""
    figures = one.figures
    return f"{figures.peak_gib:.1f} GiB, {figures.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, MFU {figures.mfu:.1%}"


def as_json(plan: Plan, machine: Machine, most: int) -> dict[str, Any]:
    """Return a plan as plain values."""

    def finalist(one: Finalist) -> dict[str, Any]:
        return {
            **_candidate(one.candidate),
            "peak_gib": one.figures.peak_gib,
            "step_seconds": one.figures.step_seconds,
            "tokens_per_second_per_gpu": one.figures.tokens_per_second_per_gpu,
            "mfu": one.figures.mfu,
            **({"largest_stage": one.figures.largest} if isinstance(one.figures, StagedFigures) else {}),
        }

    nearest = None
    if plan.nearest is not None:
        candidate, peak = plan.nearest
        nearest = {**_candidate(candidate), "peak_gib": peak, "over_gib": peak - machine.memory_gib}
    return {
        "model": plan.model,
        "device": machine.name,
        "memory_gib": machine.memory_gib,
        "best": [finalist(one) for one in plan.best[:most]],
        "too_large": [finalist(one) for one in plan.too_large],
        "losers": [
            {"why": one.why, "count": one.count, "example": one.example, "detail": one.detail} for one in plan.losers
        ],
        "nearest": nearest,
        "complete": plan.stopped is None,
        "stopped_by": plan.stopped,
        "finalists": plan.wanted,
        "estimated": plan.estimated,
        "meshes": plan.meshes,
        "kinds": plan.kinds,
        "traced": plan.traced,
        "open": plan.open,
        "unproved": plan.unproved,
        "unexpected": plan.unexpected,
        "candidates": plan.candidates,
        "seconds": plan.seconds,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    degrees = {**candidate.mesh.degrees, **candidate.mesh.view_degrees}
    return {
        "mesh": degrees, "local_batch_size": candidate.local_batch, "microbatches": candidate.microbatches,
        "values": dict(candidate.values), "recipe": candidate.given,
    }  # fmt: skip


def print_plan(plan: Plan, machine: Machine, most: int) -> None:
    """Print the ``most`` best candidates, and why the others lost."""
    if plan.model:
        say(plan.model)
    say(f"{compared(plan)}, in {plan.seconds:.0f} s")
    say(f"{plan.meshes:,} meshes of {machine.name}, {machine.memory_gib:.1f} GiB each")
    say(f"{proved(plan)}\n")
    if plan.best:
        rows = [_row(one) for one in plan.best[:most]]
        print_table(("GiB", "tokens/s/GPU", "MFU", "step s", "batch", "mesh", ""), rows)
    if plan.nearest is not None:
        candidate, peak = plan.nearest
        over = peak - machine.memory_gib
        say(
            f"nothing fits these {machine.memory_gib:.1f} GiB. The nearest is {show_bytes(over * GIB)} too large: "
            f"{describe(candidate)}"
        )
        print("try more GPUs, a shorter training.seq_len, a smaller --headroom, or --training.enable_cpu_offload true")
    elif not plan.best and plan.stopped is None:
        print("no combination is valid, or those that are cannot be simulated:")
    if plan.losers:
        print()
        print_table(
            ("others, composed", "", "best of them"),
            [(one.why, f"{one.count:,}", f"{one.example}: {one.detail}") for one in plan.losers],
        )


def _row(one: Finalist) -> tuple[str, ...]:
    candidate, figures = one.candidate, one.figures
    mesh = candidate.mesh
    keys = {dim.degree_key for dim in mesh.dims} | {view.degree_key for view in mesh.views}
    chosen = [
        f"{short(key)} {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in candidate.values.items()
        if key not in keys and value is not None and not key.startswith(f"{TrainingSection.section}.")
    ]
    where = f" ({figures.largest})" if isinstance(figures, StagedFigures) else ""
    return (
        f"{figures.peak_gib:.1f}{where}", f"{figures.tokens_per_second_per_gpu:,.0f}", f"{figures.mfu:.1%}",
        f"{figures.step_seconds:.3g}", f"{candidate.local_batch} x {candidate.microbatches}", str(mesh),
        "the recipe" if candidate.given else ", ".join(chosen),
    )  # fmt: skip
