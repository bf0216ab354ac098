"""Recomputation: what a block computed forward is computed again for backward instead of being kept (Chen et al.,
arXiv 1604.06174; selective: Korthikanti et al., arXiv 2205.05198; TorchTitan paper, section 2.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_core.api.build_context import TrainingContext
from titan_core.api.errors import UserError
from titan_core.api.microbatch import current_microbatch, entered
from titan_core.api.model_part import ModelPart
from titan_core.api.step import is_shape_inference, shape_inference
from titan_parallel.config import ActivationCheckpointSection
from titan_parallel.pipeline_plan import splits_backward
from titan_parallel.split_backward_contexts import contexts
from titan_parallel.torch_private import ATTENTION_OPERATORS, REDUCE_SCATTER

# What the selective mode keeps in any model: attention, and what was communicated. Every second matrix product is kept too.
_SAVED = {*ATTENTION_OPERATORS, REDUCE_SCATTER}
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def apply(part: ModelPart, context: TrainingContext[ActivationCheckpointSection]) -> ModelPart:
    """Let blocks recompute. Their names and classes stay as they are: only ``forward`` is another."""
    section = context.section
    if section.mode == "memory_budget":
        return part  # titan_parallel.compile configures the compiler
    twice, selection = splits_backward(context.facts), _selection(part)
    for number, block in enumerate(part.blocks().values()):
        if section.mode == "full":
            _recompute(block)
        elif section.selective_ac_option == "op" and twice:
            _recompute(block, context_fn=lambda: contexts(selection.group_of, selection.keeps))
        elif section.selective_ac_option == "op":
            # A new policy for each call: it counts, and must count the recomputation as it counted the forward pass.
            _recompute(block, context_fn=lambda: create_selective_checkpoint_contexts(selection.policy_of_a_call()))
        elif number % int(section.selective_ac_option) == 0:
            _recompute(block)
    return part


def _recompute(block: nn.Module, **options: Any) -> None:
    original = block.forward

    # A function of its own, no functools.partial of ``checkpoint``: the compiler starts at Python frames outside of torch.
    # preserve_rng_state stays on: what draws from torch's generators must draw the same numbers again.
    def forward(*arguments: Any, **keywords: Any) -> Any:
        # Compiled code keeps the microbatch's tensors, as it keeps its other inputs.
        compute = original if torch.compiler.is_compiling() else _within_microbatch(original)
        return checkpoint(compute, *arguments, use_reentrant=False, **options, **keywords)

    block.forward = forward


def _within_microbatch(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, always called within the microbatch that is current now. Recomputation runs during another one or none,
    and on a GPU in a thread of autograd's."""
    microbatch, inferring = current_microbatch(), is_shape_inference()

    def compute(*arguments: Any, **keywords: Any) -> Any:
        with entered(microbatch), shape_inference() if inferring else nullcontext():
            return forward(*arguments, **keywords)

    return compute


@dataclass(frozen=True)
class _Selection:
    """Which results are kept."""

    saved: frozenset[Any]
    """Operators whose results are all kept; of matrix products, every second one."""

    def group_of(self, operator: Any) -> Any:
        """What an operator is counted with: all products together. ``None`` where it is never kept."""
        if operator in self.saved:
            return operator
        return "products" if operator in _MATMULS else None

    def keeps(self, operator: Any, number: int) -> bool:
        """Whether the result of the ``number``-th operator of its group is kept."""
        return operator in self.saved or number % 2 == 0

    def policy_of_a_call(self) -> Callable[..., CheckpointPolicy]:
        """A policy that counts, forward and recomputation apart."""
        seen: dict[Any, int] = defaultdict(int)

        def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
            group = self.group_of(operator)
            if group is None:
                return CheckpointPolicy.PREFER_RECOMPUTE
            place = context.is_recompute, group
            seen[place] += 1
            keep = self.keeps(operator, seen[place] - 1)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return policy


def _selection(part: ModelPart) -> _Selection:
    """What is always kept, and what transforms and the model add to it."""
    named = (operator_named(name) for name in part.layout.saved_operators)
    return _Selection(frozenset((*_SAVED, *part.saved_operators, *named)))


def operator_named(name: str) -> Any:
    """The operator that torch's dispatcher calls ``name``, such as ``"aten::topk"`` or ``"my_kernels::scan.out"``.

    Raises:
        UserError: no such operator is registered.
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        why = f"saved_operators names {name!r}, and torch knows no such operator"
        fix = 'name it as "namespace::operator", and have the model register it when it is built'
        raise UserError.one("the model's layout", why, fix) from None
