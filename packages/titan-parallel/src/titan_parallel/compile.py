"""torch.compile, block by block: one graph serves all blocks of a kind, so that compiling takes the time of one."""

from __future__ import annotations

import torch

from titan_core.model.part import ModelPart, TransformContext
from titan_parallel.config import CompileSection


def apply(part: ModelPart, context: TransformContext) -> ModelPart:
    """Compile each block in place (its name stays as it is), and the loss."""
    section = context.facts.section(CompileSection)
    if "model" in section.components:
        for block in part.blocks().values():
            block.compile(backend=section.backend, fullgraph=section.fullgraph)
    if "loss" in section.components:
        part.loss = torch.compile(part.loss, backend=section.backend)
    return part
