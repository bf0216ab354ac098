"""Activation checkpointing: backward recomputes the activations of a block instead of keeping them (Chen et al.,
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
from titan_core.api.microbatch import current_microbatch, microbatch_scope
from titan_core.api.model_part import ModelPart
from titan_core.api.step import is_shape_inference, shape_inference
from titan_parallel.config import ActivationCheckpointSection
from titan_parallel.pipeline_plan import splits_backward
from titan_parallel.split_backward_contexts import contexts
from titan_parallel.torch_private import ATTENTION_OPERATORS, REDUCE_SCATTER

# The selective mode keeps these results in every model, and those of every second matmul.
_SAVED = {*ATTENTION_OPERATORS, REDUCE_SCATTER}
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def apply(part: ModelPart, context: TrainingContext[ActivationCheckpointSection]) -> ModelPart:
    """Make blocks recompute by replacing their ``forward``. Names and classes do not change."""
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
            # The policy counts operators, so each call needs a new one.
            _recompute(block, context_fn=lambda: create_selective_checkpoint_contexts(selection.new_policy()))
        elif number % int(section.selective_ac_option) == 0:
            _recompute(block)
    return part


def _recompute(block: nn.Module, **options: Any) -> None:
    original = block.forward

    # A function, not a functools.partial of ``checkpoint``: the compiler starts at Python frames outside torch.
    # preserve_rng_state stays on, so that code that draws from torch's generators draws the same numbers again.
    def forward(*arguments: Any, **keywords: Any) -> Any:
        # Compiled code saves the microbatch's tensors with its other inputs.
        compute = original if torch.compiler.is_compiling() else _within_microbatch(original)
        return checkpoint(compute, *arguments, use_reentrant=False, **options, **keywords)

    block.forward = forward


def _within_microbatch(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` bound to the microbatch that is current now. Recomputation runs during another microbatch or none,
    and on a GPU in an autograd thread."""
    microbatch, inferring = current_microbatch(), is_shape_inference()

    def compute(*arguments: Any, **keywords: Any) -> Any:
        with microbatch_scope(microbatch), shape_inference() if inferring else nullcontext():
            return forward(*arguments, **keywords)

    return compute


@dataclass(frozen=True)
class _Selection:
    """Decides which results to keep."""

    saved: frozenset[Any]
    """Operators whose results are always kept."""

    def group_of(self, operator: Any) -> Any:
        """Return the group to count ``operator`` in: all matmuls share one. ``None`` if its result is never kept."""
        if operator in self.saved:
            return operator
        return "matmuls" if operator in _MATMULS else None

    def keeps(self, operator: Any, number: int) -> bool:
        """Whether to keep the result of operator ``number`` of its group: always for ``saved``, every second matmul."""
        return operator in self.saved or number % 2 == 0

    def new_policy(self) -> Callable[..., CheckpointPolicy]:
        """Return a policy for one call, which counts operators separately in forward and in recomputation."""
        seen: dict[Any, int] = defaultdict(int)

        def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
            group = self.group_of(operator)
            if group is None:
                return CheckpointPolicy.PREFER_RECOMPUTE
            key = context.is_recompute, group
            seen[key] += 1
            keep = self.keeps(operator, seen[key] - 1)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return policy


def _selection(part: ModelPart) -> _Selection:
    """Return the operators that are always kept and those that transforms and the model add."""
    named = (operator_named(name) for name in part.layout.saved_operators)
    return _Selection(frozenset((*_SAVED, *part.saved_operators, *named)))


def operator_named(name: str) -> Any:
    """Return the operator with the dispatcher name ``name``, such as ``"aten::topk"`` or ``"my_kernels::scan.out"``.

    Raises:
        UserError: No operator of this name is registered.
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        why = f"saved_operators names {name!r}, which is not an operator registered with torch"
        fix = 'write it as "namespace::operator", and register it when the model is built'
        raise UserError.one("the model's layout", why, fix) from None
