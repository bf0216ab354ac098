"""A job with fewer blocks and microbatches, whose figures extend linearly to those of the whole job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from titan_core.api import ModelPart, Phase, Ref, TrainingContext, Transform
from titan_core.api.parallel.model_part import PrunedModule
from titan_core.api.plugins.assembled_job import AssembledJob


@dataclass
class Parts:
    """The parts of the model that a rank has."""

    blocks: list[int]
    """Number of blocks of each, before the reduction."""
    kept: list[list[str]]
    """Names of the blocks that remain of each."""
    modules: list[set[str]]
    """First two parts of the names of all modules of each."""
    whole: list[int] | None = None
    """Number of blocks of each, if the model that is built has fewer."""
    repeating: list[int] = field(default_factory=list)
    """Of each: how many of the remaining blocks, those before the last one, stand for others."""
    elements: list[Mapping[str, int]] = field(default_factory=list)
    """Of each: name of a remaining block, or of a unit of embedding or head -> elements of its parameters, before they are
    divided."""


@dataclass(frozen=True)
class _Code(Ref[Any]):
    """A reference to a function that exists already."""

    function: Callable[..., Any] | None = None

    def load(self) -> Any:
        return self.function


def keep_blocks(job: AssembledJob, most: int | None, parts: Parts, repeating: int = 0) -> AssembledJob:
    """Return ``job`` with at most ``most`` blocks in each part (``None``: all). Building the model adds to ``parts``.

    Args:
        repeating: how many blocks of a part that has ``most`` stand for others.
    """

    def apply(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
        names = list(part.blocks())
        whole = len(names) if parts.whole is None else parts.whole[len(parts.blocks)]
        kept = names[: whole if most is None else min(most, whole)]
        for name in names[len(kept) :]:
            part.module.set_submodule(name, PrunedModule())
        parts.blocks.append(whole)
        parts.kept.append(kept)
        parts.repeating.append(repeating if len(kept) == most else 0)
        units = (*part.layout.embedding, *part.layout.head)
        parts.modules.append({*kept, *part.present(units)})
        elements: Counter[str] = Counter()
        for name, parameter in part.module.named_parameters():
            elements[next((one for one in (*kept, *units) if f"{name}.".startswith(f"{one}.")), "")] += parameter.numel()
        parts.elements.append(elements)
        return part

    reduction = Transform(
        name="fewer_blocks",
        summary="keep some blocks of each part",
        phase=Phase.PIPELINE,
        apply=_Code("titan_simulate.estimate.reduce:keep_blocks", function=apply),
        active=lambda context: True,
    )
    before = [one for one in job.transforms if one.phase is Phase.PIPELINE]
    after = [one for one in job.transforms if one.phase is not Phase.PIPELINE]
    return replace(job, transforms=(*before, reduction, *after))
