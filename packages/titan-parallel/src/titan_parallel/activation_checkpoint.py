"""Activation checkpointing: backward recomputes the activations of a block instead of keeping them (Chen et al.,
arXiv 1604.06174; selective: Korthikanti et al., arXiv 2205.05198; TorchTitan paper, section 2.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_core.api import Experts, ModelPart, TrainingContext, UserError, current_microbatch
from titan_core.api.parallel.microbatch import microbatch_scope
from titan_core.api.parallel.step import is_shape_inference, shape_inference
from titan_parallel.config import ActivationCheckpointSection, ActivationOffloadKeys, CompileSection
from titan_parallel.pipeline_plan import splits_backward
from titan_parallel.slots import SAVE_POLICIES
from titan_parallel.split_backward_contexts import contexts
from titan_parallel.torch_private import MATMULS, SAVED_OPERATORS

SavePolicy = Callable[[Any, int], bool | None]
"""(operator, number of calls of it before this one in the forward pass of the block) -> whether to save its result for the
backward pass; ``None``: decide as without a policy."""


def apply(part: ModelPart, context: TrainingContext[ActivationCheckpointSection]) -> ModelPart:
    """Make blocks recompute by replacing their ``forward``. Names and classes do not change."""
    section = context.section
    if section.mode == "memory_budget":
        return part  # titan_parallel.compile configures the compiler
    saved, policies = saved_operators(part), part.entries(SAVE_POLICIES)
    offloads = context.job.section(ActivationOffloadKeys).offload_share > 0
    for name in policies.keys() - part.blocks().keys():
        why = f"a plugin left a policy for {name!r} in {SAVE_POLICIES.name}, which is not a block of this part of the model"
        raise UserError.one(f"module {name!r} of the model", why, "name a block, as in part.blocks()")
    for number, (name, block) in enumerate(part.blocks().items()):
        if section.mode == "full":
            _recompute(block)
        elif section.selective_ac_option == "op":
            selection = Selection(saved, policies.get(name))
            variant = "" if selection.policy is None else str(list(policies.values()).index(selection.policy))
            # FSDP gathers experts, which are on a view of the mesh, within the block: in recomputation perhaps not again,
            # but torch's record requires the same operators (torch 2.15). Such a block is no single compiled graph, which
            # would need torch's record.
            divided = any(context.mesh.view_of(parameter) is not None for parameter in block.parameters())
            # Routers of transformers change what torch's record has saved of them.
            has_experts = any(
                isinstance(part.layout.rule(f"{name}.{path}"), Experts) for path, _ in block.named_parameters()
            )
            eager_experts = has_experts and not context.job.section(CompileSection).enable
            own_record = splits_backward(context.job) or divided or eager_experts
            compiled_fn = _context_function(selection, own_record)
            # Torch's record keeps on the device what is to be offloaded.
            _recompute(block, variant, _context_function(selection, True) if offloads else None, context_fn=compiled_fn)
        elif number % int(section.selective_ac_option) == 0:
            _recompute(block)
    return part


def _recompute(
    block: nn.Module, variant: str = "", eager_contexts: Callable[[], tuple[Any, Any]] | None = None, **options: Any
) -> None:
    """Make ``block`` recompute.

    Args:
        variant: compiled blocks of one may share a graph.
        eager_contexts: the ``context_fn`` of code that is not being compiled, if that is another.
        options: of :func:`torch.utils.checkpoint.checkpoint`.
    """
    original = block.forward
    eager_options = options if eager_contexts is None else {**options, "context_fn": eager_contexts}

    # A function, not a functools.partial of ``checkpoint``: the compiler starts at Python frames outside torch.
    # preserve_rng_state stays on, so that code that draws from torch's generators draws the same numbers again.
    def forward(*arguments: Any, **keywords: Any) -> Any:
        # Compiled code saves the microbatch's tensors with its other inputs.
        compiling = torch.compiler.is_compiling()
        compute = original if compiling else _within_microbatch(original)
        assert variant >= ""  # so that the compiler compares it: it does not look into context_fn
        chosen = options if compiling else eager_options
        return checkpoint(compute, *arguments, use_reentrant=False, **chosen, **keywords)

    block.forward = forward


def _context_function(selection: Selection, own_record: bool) -> Callable[[], tuple[Any, Any]]:
    """Return the ``context_fn`` of a block.

    Args:
        own_record: whether to record saved results without torch (:mod:`titan_parallel.split_backward_contexts`).
    """
    if own_record:
        return lambda: contexts(selection.new_decision)
    return lambda: _contexts(selection)


def _within_microbatch(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` bound to the microbatch that is current now. Recomputation runs during another microbatch or none,
    and on a GPU in an autograd thread."""
    microbatch, inferring = current_microbatch(), is_shape_inference()

    def compute(*arguments: Any, **keywords: Any) -> Any:
        with microbatch_scope(microbatch), shape_inference() if inferring else nullcontext():
            return forward(*arguments, **keywords)

    return compute


Decision = Callable[[Any], tuple[Any, bool]]
"""Operator -> a key of this call of it, the same in forward and in recomputation, and whether to save its result."""


@dataclass(frozen=True)
class Selection:
    """Decides which results of a block to save: those of some operators always, and those of every second matmul."""

    saved: frozenset[Any]
    """Operators whose results are always saved."""
    policy: SavePolicy | None = None
    """Decides first."""

    def new_decision(self) -> Decision:
        """Return the decisions for one pass through a block, which count the operators."""
        calls: Counter[Any] = Counter()
        matmuls = 0

        def decide(operator: Any) -> tuple[Any, bool]:
            nonlocal matmuls
            number = calls[operator]
            calls[operator] += 1
            keep = operator in self.saved
            if operator in MATMULS:
                # The second, the fourth and so on: backward needs no result of a block's last matmul, because a residual
                # addition saves nothing. That is the seventh of attention and a gated feed-forward.
                keep = keep or matmuls % 2 == 1
                matmuls += 1
            chosen = None if self.policy is None else self.policy(operator, number)
            return (operator, number), keep if chosen is None else chosen

        return decide


def _contexts(selection: Selection) -> tuple[Any, Any]:
    """Return torch's contexts of forward and recomputation."""
    # torch 2.11 applies the policy in both passes.
    forward, again = selection.new_decision(), selection.new_decision()

    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        _, keep = (again if context.is_recompute else forward)(operator)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def saved_operators(part: ModelPart) -> frozenset[Any]:
    """Return the operators whose results are always saved, in every model or because transforms or this model add them."""
    named = (operator_named(name) for name in part.layout.saved_operators)
    return frozenset((*SAVED_OPERATORS, *part.saved_operators, *named))


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
