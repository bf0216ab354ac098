"""Context parallelism: each sequence divided over ranks, with exact attention over all of it (TorchTitan paper, section 2.2;
ring attention: Liu et al., arXiv 2310.01889; head-and-tail sharding: arXiv 2407.21783, section 3.3.2).

A sequence is cut into ``2 x degree`` chunks. Rank ``r`` takes chunk ``r`` from the front and chunk ``r`` from the back, so
under a causal mask all ranks have the same work.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from titan_core.api.batch import Batch, with_positions
from titan_core.api.build_context import TrainingContext
from titan_core.api.errors import UserError
from titan_core.api.layout_rules import CAUSAL_ATTENTION
from titan_core.api.model_part import ModelPart
from titan_core.api.sections import DataSection
from titan_core.api.sequence_share import SequenceShare
from titan_parallel.config import ContextParallelKeys
from titan_parallel.gathered_attention import GatheredAttention
from titan_parallel.torch_private import ring_attention

log = logging.getLogger(__name__)


def apply(part: ModelPart, context: TrainingContext[ContextParallelKeys]) -> ModelPart:
    """Make mixers attend to the positions of all ranks of the mesh dimension ``cp``, and divide the batches."""
    if not part.objective.per_position:
        raise UserError.one(
            "objective.name",
            "needs all positions of a sequence together, and context parallelism divides them",
            "set parallelism.context_parallel_degree = 1",
        )
    mesh = context.mesh["cp"]
    rank, size = mesh.get_local_rank(), mesh.size()
    share = SequenceShare(mesh, tuple((chunk, 2 * size - 1 - chunk) for chunk in range(size)))
    found = [(name, module, part.layout.mixer(name)) for name, module in part.named_modules()]
    mixers = [(name, module, mixer) for name, module, mixer in found if mixer is not None]
    for name, module, mixer in mixers:
        if mixer.kind == CAUSAL_ATTENTION:
            _require_causal_attention(name, module)
        elif mixer.divided is not None:
            forward = mixer.divided.load()(module, share)
            if not callable(forward):
                why = f"mixer {name!r}: {mixer.divided.target!r} must return a forward function, but returned {forward!r}"
                raise UserError.one("layout of the model", why, "fix the model plugin")
            module.forward = forward
    _divide_attention([module for _, module, mixer in mixers if mixer.kind == CAUSAL_ATTENTION], share, context)
    part.batch_transforms += (HeadAndTail(rank, size),)
    return part


def _divide_attention(mixers: list[nn.Module], share: SequenceShare, context: TrainingContext[ContextParallelKeys]) -> None:
    if not mixers:
        return
    documents = context.facts.section(DataSection).document_mask
    if context.device.type == "cuda" and not documents:
        method = context.section.context_parallel_rotate_method
        _use_ring(share.mesh, mixers, method)
        log.info("context parallelism: torch's ring attention, keys and values exchanged by %s", method)
        return
    for mixer in mixers:
        mixer.forward = GatheredAttention(share).forward
    why = "torch's ring attention has no " + ("document masks" if documents else f"kernel for {context.device.type}")
    log.info("context parallelism: exact attention over gathered keys and values (%s)", why)


class HeadAndTail:
    """Takes a rank's share of a batch: one chunk from the front of each sequence and its mirror from the back."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def __call__(self, batch: Batch) -> Batch:
        """Reduce the batch's tensors from ``[batch, seq]`` to ``[batch, seq / size]``."""
        return with_positions(batch).map_sequence(self._share)

    def _share(self, whole: Tensor) -> Tensor:
        chunks = whole.chunk(2 * self._size, dim=1)
        return torch.cat((chunks[self._rank], chunks[-1 - self._rank]), dim=1)


def _require_causal_attention(name: str, mixer: nn.Module) -> None:
    """Run the mixer, and compare it with causal softmax attention of the usual scale, which replaces it.

    Raises:
        UserError: The results differ; names the module.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 8, 16, generator=generator, device="cpu") for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if q.device.type == "cpu" and not any(True for _ in mixer.parameters()):
        repeated = (heads.repeat_interleave(2, dim=1) for heads in (k, v))
        if torch.allclose(mixer(q, *repeated), expected, atol=1e-5):
            return
    raise UserError.one(
        f"module {name!r} of the model",
        "has the mixer kind causal_attention, but has parameters or does not compute causal softmax attention",
        "fix its kind in the layout's mixers, or set parallelism.context_parallel_degree = 1",
    )


def _use_ring(mesh: DeviceMesh, mixers: list[nn.Module], method: str) -> None:
    """Make the mixers compute torch's ring attention."""
    style = ring_attention(method)
    for mixer in mixers:
        # The ring does not support grouped heads. This hook runs before the one that makes DTensors.
        mixer.register_forward_pre_hook(_repeat_heads)
        parallelize_module(mixer, mesh, style)


def _repeat_heads(mixer: nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = arguments
    groups = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
