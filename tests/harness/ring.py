"""A third party's mesh dimension. With ``data_parallel="own"`` it sums gradients itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar, Literal

from titan_core.api import MeshDim, MeshUse, Phase, Ref, Section, StepUse, Transform, hookimpl
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.discovery import Plugin
from titan_core.plugins.registry import Components


class RingKeys(Section):
    section: ClassVar[str] = "ring"

    degree: int = 1


class SumOverRing:
    """Sums gradients over the ring."""

    times: ClassVar[dict[int, int]] = {}
    """Step -> how often (default: once)."""
    factor: ClassVar[float] = 1.0
    int8: ClassVar[bool] = False
    """Whether each rank rounds what it sends to 8 bits."""

    def __init__(self, parts: Any, context: Any) -> None:
        self.group = context.mesh["ring"].get_group()
        self.parameters = [parameter for part in parts for _, parameter in part.named_parameters()]

    @hookimpl
    def titan_gradients_complete(self, step: int) -> None:
        import torch.distributed as dist

        for parameter in self.parameters * self.times.get(step, 1):
            gradient = parameter.grad.mul_(self.factor)
            if self.int8:
                scale = gradient.abs().max() / 127
                gradient.div_(scale).round_().mul_(scale)
            dist.all_reduce(gradient, group=self.group)


Divides = Literal["layers", "batch", "sequence", "weights"]


Treated = Literal["shard", "replicate", "own"]


def ring_job(
    divides: Divides,
    diverges: bool = False,
    reduces: tuple[str, ...] = (),
    treated: Treated = "own",
    overrides: Mapping[str, object] | None = None,
    tolerance: float = 0.0,
) -> AssembledJob:
    """Return a job on 2 ranks along a third party's mesh dimension."""
    dim = MeshDim("ring", "ring.degree", divides, diverges, data_parallel=treated)
    ring = Transform(
        name="ring",
        summary="",
        config=RingKeys,
        phase=Phase.DATA,
        mesh=MeshUse(dims=(dim,), sums=reduces, tolerance=tolerance),
        active=lambda context: context.job.mesh.degree("ring") > 1,
        steps=StepUse(observer=Ref("harness.ring:SumOverRing")),
    )
    found = Components.from_installed().found
    plugins = (*found.plugins, Plugin("ring", "titan-ring", "1.0", ModuleType("ring"), (ring,)))
    more = [Override(key, str(value)) for key, value in {"ring.degree": 2, **(overrides or {})}.items()]
    config, registry = load_config("tiny", more, Components(replace(found, plugins=plugins)))
    return assemble(config, registry, 2)
