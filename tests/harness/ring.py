"""A third party's mesh dimension, for jobs that are assembled but not built."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import ClassVar, Literal

from titan_core.api.components import Phase, Transform
from titan_core.api.config import Override
from titan_core.api.job import Job
from titan_core.api.mesh import MeshDim
from titan_core.api.ref import Ref
from titan_core.api.section import Section
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.discovery import Plugin
from titan_core.plugins.registry import Registry


class RingKeys(Section):
    section: ClassVar[str] = "ring"

    degree: int = 1


Divides = Literal["layers", "batch", "sequence", "weights"]


Treated = Literal["shard", "replicate", "own"]


def ring_job(divides: Divides, diverges: bool = False, reduces: tuple[str, ...] = (), treated: Treated = "own") -> Job:
    """Return a job on 2 ranks along a third party's mesh dimension."""
    ring = Transform(
        name="ring",
        summary="",
        config=RingKeys,
        phase=Phase.DATA,
        mesh_dims=(MeshDim("ring", "ring.degree", divides, diverges, data_parallel=treated),),
        active=lambda context: context.facts.mesh.degree("ring") > 1,
        serves=("ring.degree",),
        reduces=reduces,
        apply=Ref("harness.transforms:bare"),
    )
    found = Registry.from_installed().found
    plugins = (*found.plugins, Plugin("ring", "titan-ring", "1.0", ModuleType("ring"), (ring,)))
    config, registry = load_config("tiny", [Override("ring.degree", "2")], Registry(replace(found, plugins=plugins)))
    return assemble(config, registry, 2)
