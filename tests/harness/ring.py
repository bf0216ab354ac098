"""A third party's mesh dimension, for jobs that are assembled but not built."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import ClassVar, Literal

from titan_core.api import MeshDim, MeshUse, Phase, Section, Transform
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.discovery import Plugin
from titan_core.plugins.registry import Components


class RingKeys(Section):
    section: ClassVar[str] = "ring"

    degree: int = 1


Divides = Literal["layers", "batch", "sequence", "weights"]


Treated = Literal["shard", "replicate", "own"]


def ring_job(
    divides: Divides, diverges: bool = False, reduces: tuple[str, ...] = (), treated: Treated = "own"
) -> AssembledJob:
    """Return a job on 2 ranks along a third party's mesh dimension."""
    ring = Transform(
        name="ring",
        summary="",
        config=RingKeys,
        phase=Phase.DATA,
        mesh=MeshUse(dims=(MeshDim("ring", "ring.degree", divides, diverges, data_parallel=treated),), sums=reduces),
        active=lambda context: context.job.mesh.degree("ring") > 1,
    )
    found = Components.from_installed().found
    plugins = (*found.plugins, Plugin("ring", "titan-ring", "1.0", ModuleType("ring"), (ring,)))
    config, registry = load_config("tiny", [Override("ring.degree", "2")], Components(replace(found, plugins=plugins)))
    return assemble(config, registry, 2)
