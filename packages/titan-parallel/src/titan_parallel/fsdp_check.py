"""What makes data parallelism impossible, found before anything is built. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem
from titan_core.api.layout import ModelLayout
from titan_parallel.config import FSDPKeys


def check(context: JobContext[FSDPKeys]) -> Iterator[Problem]:
    """Modules that share a parameter must be gathered together: those of the embedding and the head are, and those within a
    block."""
    layout = context.facts.model.layout
    for name, source in layout.tied.items():
        if _unit_of(name, layout) != _unit_of(source, layout):
            why = f"its layout ties {name!r} to {source!r}, and FSDP gathers the two apart"
            fix = "tie parameters within a block, or of embedding and head; or train on one device in float32"
            yield context.config.problem("model.name", why, fix)


def _unit_of(parameter: str, layout: ModelLayout) -> str:
    """The block that has ``parameter``; of all that are in no block ``""``."""
    rest = parameter.removeprefix(f"{layout.blocks}.")
    return rest.partition(".")[0] if rest != parameter else ""
