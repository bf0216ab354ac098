"""Recomputation: what a block computed forward is computed again for backward instead of being kept (Chen et al.,
arXiv 1604.06174; selective: Korthikanti et al., arXiv 2205.05198; TorchTitan paper, section 2.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_core.api.build_context import TrainingContext
from titan_core.api.microbatch import current_microbatch, entered
from titan_core.api.model_part import ModelPart
from titan_core.api.step import is_shape_inference, shape_inference
from titan_parallel.config import ActivationCheckpointSection
from titan_parallel.pipeline_plan import splits_backward
from titan_parallel.split_backward_contexts import contexts

_aten = torch.ops.aten

# What the selective mode keeps: attention, and what was communicated. Matrix products are kept every second time.
_SAVED = {
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
_MATMULS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}


def apply(part: ModelPart, context: TrainingContext[ActivationCheckpointSection]) -> ModelPart:
    """Let blocks recompute. Their names and classes stay as they are: only ``forward`` is another."""
    section = context.section
    if section.mode == "memory_budget":
        return part  # titan_parallel.compile configures the compiler
    twice = splits_backward(context.facts)
    for number, block in enumerate(part.blocks().values()):
        if section.mode == "full":
            _recompute(block)
        elif section.selective_ac_option == "op" and twice:
            _recompute(block, context_fn=lambda: contexts(_group_of, _is_kept))
        elif section.selective_ac_option == "op":
            # A new policy for each call: it counts, and must count the recomputation as it counted the forward pass.
            _recompute(block, context_fn=lambda: create_selective_checkpoint_contexts(_policy_of_a_call()))
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


def _policy_of_a_call() -> Callable[..., CheckpointPolicy]:
    """A policy that counts matrix products, forward and recomputation apart."""
    seen: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        keep = operator in _SAVED
        if operator in _MATMULS:
            keep = _is_kept(operator, seen[context.is_recompute])
            seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _group_of(operator: Any) -> Any:
    """What an operator is counted with: all products together."""
    return "products" if operator in _MATMULS else operator if operator in _SAVED else None


def _is_kept(operator: Any, number: int) -> bool:
    """Whether the result of the ``number``-th operator of its group is kept."""
    return operator in _SAVED or number % 2 == 0
