"""torch.compile, block by block: one graph serves all blocks of a kind, so compilation takes the time of one block."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_core.api.batch import Batch
from titan_core.api.build_context import TrainingContext
from titan_core.api.model_part import ModelPart
from titan_core.api.objective import ObjectiveFunction
from titan_core.api.vocabulary import Vocabulary
from titan_parallel.config import ActivationCheckpointSection, CompileSection
from titan_parallel.torch_private import set_activation_memory_budget


def apply(part: ModelPart, context: TrainingContext[CompileSection]) -> ModelPart:
    """Compile each block in place, without renaming it, and the loss."""
    section = context.section
    recompute = context.facts.section(ActivationCheckpointSection)
    # A process-wide setting that is read when a block is compiled. Always set it, to reset that of an earlier job.
    budget = recompute.memory_budget if recompute.mode == "memory_budget" else 1.0
    set_activation_memory_budget(budget)
    if "model" in section.components:
        for block in part.blocks().values():
            block.compile(backend=section.backend, fullgraph=section.fullgraph)
    if "loss" in section.components:
        part.wrap_objective(lambda objective: CompiledObjective(objective, section.backend))
    return part


class CompiledObjective(ObjectiveFunction):
    """A compiled objective."""

    def __init__(self, objective: ObjectiveFunction, backend: str) -> None:
        self.vocabulary_sharded, self.per_position = objective.vocabulary_sharded, objective.per_position
        self._compiled = torch.compile(objective.__call__, backend=backend)

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.objective.ObjectiveFunction`."""
        loss: Tensor = self._compiled(logits, batch, vocabulary)
        return loss
