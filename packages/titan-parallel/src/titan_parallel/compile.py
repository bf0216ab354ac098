"""torch.compile, block by block: one graph serves all blocks of a kind, so compilation takes the time of one block."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from titan_core.api import Batch, ModelPart, ObjectiveFunction, TrainingContext, UserError, Vocabulary
from titan_core.toolkit.errors import nearest
from titan_parallel.config import ActivationCheckpointSection, CompileSection
from titan_parallel.fsdp import gathered_within_blocks, on_views
from titan_parallel.slots import COMPILER_OPTIONS
from titan_parallel.torch_private import set_activation_memory_budget

log = logging.getLogger(__name__)


def apply(part: ModelPart, context: TrainingContext[CompileSection]) -> ModelPart:
    """Compile each block in place, without renaming it, and the loss.

    Raises:
        UserError: torch and its installed backends know no ``compile.backend`` of this name.
    """
    section = context.section
    known = torch.compiler.list_backends(None)
    if section.backend not in known:
        raise UserError(
            context.config.problem("compile.backend", "torch has no such backend", nearest(section.backend, known))
        )
    recompute = context.job.section(ActivationCheckpointSection)
    # A process-wide setting that is read when a block is compiled. Always set it, to reset that of an earlier job.
    budget = recompute.memory_budget if recompute.mode == "memory_budget" else 1.0
    set_activation_memory_budget(budget)
    if "model" in section.components:
        fullgraph = _is_one_graph(part, context)
        for name, block in part.blocks().items():
            options = _options(part, name) if section.backend == "inductor" else None
            block.compile(backend=section.backend, fullgraph=fullgraph, options=options)
    if "loss" in section.components:
        part.wrap_objective(lambda objective: CompiledObjective(objective, section.backend))
    return part


def _is_one_graph(part: ModelPart, context: TrainingContext[CompileSection]) -> bool:
    """Return whether a graph break in a block is an error; log why not, if nothing else is set.

    Raises:
        UserError: it is set, and blocks are interrupted.
    """
    wanted = context.section.fullgraph
    why = []
    if counted := [*part.statistics, *part.auxiliary_losses]:
        why.append(f"modules count or add losses ({', '.join(counted)})")
    if units := gathered_within_blocks(part, context):
        why.append(f"data parallelism gathers modules within a block ({units[0]}{', ...' if len(units) > 1 else ''})")
    if wanted and why:
        fix = "remove the key"
        raise UserError(context.config.problem("compile.fullgraph", f"{' and '.join(why)}, which interrupts its graph", fix))
    if wanted is not None:
        return wanted
    if why:
        log.info("compiled blocks are interrupted: %s", " and ".join(why))
    # Ranks that divide a module otherwise, such as experts, exchange what it computes, for which the host may wait.
    return not why and not on_views(part, context.mesh)


def _options(part: ModelPart, block: str) -> dict[str, Any] | None:
    """Return the options for ``block``. Blocks with the same options share a compilation."""
    options: dict[str, Any] = {}
    for name, wanted in part.entries(COMPILER_OPTIONS).items():
        if name == block or name.startswith(f"{block}."):
            options.update(wanted)
    return options or None


class CompiledObjective(ObjectiveFunction):
    """A compiled objective."""

    def __init__(self, objective: ObjectiveFunction, backend: str) -> None:
        self.vocabulary_sharded, self.per_position = objective.vocabulary_sharded, objective.per_position
        self._compiled = torch.compile(objective.__call__, backend=backend)

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        loss: Tensor = self._compiled(logits, batch, vocabulary)
        return loss
