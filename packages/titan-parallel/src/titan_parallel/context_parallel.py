"""Context parallelism: each sequence divided over ranks, with exact attention over all of it (TorchTitan paper, section 2.2;
ring attention: Liu et al., arXiv 2310.01889; head-and-tail sharding: arXiv 2407.21783, section 3.3.2).

A sequence is cut into ``2 x degree`` chunks. Rank ``r`` takes chunk ``r`` from the front and chunk ``r`` from the back, so
under a causal mask all ranks have the same work. Ranks pass or gather keys and values, or trade heads for positions
(:mod:`titan_parallel.head_exchange`), or neighbours trade and the rest forms rings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import (
    CAUSAL_ATTENTION,
    Batch,
    CausalAttention,
    Mixer,
    ModelPart,
    ObjectiveFunction,
    SequenceShare,
    TrainingContext,
    UserError,
    Vocabulary,
)
from titan_core.api.config.sections import DataSection
from titan_core.api.model.attention import attend
from titan_core.api.model.attention_mask import attention_masks, document_mask, mask_name, uses_block_masks
from titan_core.api.training.batch import with_positions
from titan_parallel.config import HEADS, ContextParallelKeys
from titan_parallel.head_exchange import HeadExchange, attention_by_heads, mixer_by_heads
from titan_parallel.region_collectives import Ranks
from titan_parallel.ring_attention import RING_ATTENTION, attend_gathered, ring_attention
from titan_parallel.window_attention import attend_within_window, halo_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


log = logging.getLogger(__name__)


def apply(part: ModelPart, context: TrainingContext[ContextParallelKeys]) -> ModelPart:
    """Make mixers attend to the positions of all ranks of the mesh dimension ``cp``, and divide the batches."""
    objective = part.objective
    if not (objective.per_position or objective.per_document):
        raise UserError.one(
            "objective.name",
            "needs all positions of a sequence together, and context parallelism divides them",
            "set parallelism.context_parallel_degree = 1",
        )
    mesh = context.mesh["cp"]
    rank, size = mesh.get_local_rank(), mesh.size()
    share = SequenceShare(mesh, head_and_tail(size))
    found = [(name, module, part.layout.mixer(name)) for name, module in part.named_modules()]
    mixers = [(name, module, mixer) for name, module, mixer in found if mixer is not None]
    exchange, ring = None, share
    if HEADS.name in context.mesh:
        exchange, rings = HeadExchange(Ranks(context.mesh[HEADS.name])), context.mesh[HEADS.remainder]
        ring = SequenceShare(rings, head_and_tail(rings.size()))
    part.attention_masks = DividedMasks(ring, size)
    if ring.mesh.size() > 1 and context.config.section(DataSection).document_attention == "varlen":
        why = "a ring of ranks shards sequences, whose queries are not those of whole documents (%s divides heads instead)"
        log.warning(f"data.document_attention: FlexAttention computes the documents: {why}", HEADS.degree_key)
    passed = context.section.context_parallel_rotate_method == "alltoall"
    # One object for each kind: the compiler compares them, and one graph serves all blocks of a kind.
    attention = {mixer: DividedAttention(ring, mixer, passed) for _, _, mixer in mixers if mixer.kind == CAUSAL_ATTENTION}
    for name, module, mixer in mixers:
        if mixer.kind == CAUSAL_ATTENTION:
            require_causal_attention(name, module, mixer)
            attend_to_heads = attention[mixer].forward if ring.mesh.size() > 1 else module.forward
            module.forward = attend_to_heads if exchange is None else attention_by_heads(exchange, attend_to_heads)
        elif exchange is not None and mixer.heads_dim is not None:
            _require_no_parameters(name, module)
            compute = _divided(name, module, mixer, ring) if ring.mesh.size() > 1 else module.forward
            module.forward = mixer_by_heads(exchange, compute, mixer, context.job.mesh.degree("tp"))
        elif mixer.divided is not None:
            module.forward = _divided(name, module, mixer, share)
    part.saved_operators += (RING_ATTENTION,)
    part.batch_transforms += (HeadAndTail(rank, size, mesh.get_group()),)
    if not objective.per_position:
        part.wrap_objective(lambda objective: OnEveryRank(objective, size))
    return part


class OnEveryRank(ObjectiveFunction):
    """An objective of sums over documents, which all ranks that share the sequences compute: each returns its share."""

    def __init__(self, objective: ObjectiveFunction, ranks: int) -> None:
        self.vocabulary_sharded, self.per_position, self.per_document = objective.vocabulary_sharded, False, True
        self._objective, self._ranks = objective, ranks

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        return self._objective(logits, batch, vocabulary) / self._ranks


def head_and_tail(size: int) -> tuple[tuple[int, int], ...]:
    """Return the chunks of each of ``size`` ranks."""
    return tuple((chunk, 2 * size - 1 - chunk) for chunk in range(size))


class DividedAttention:
    """Causal attention of a rank's chunks of each sequence to all of it: within a window, to the keys and values before each
    chunk; within documents or with capped scores, which the kernels of ring attention do not compute, to gathered keys and
    values; otherwise ring attention."""

    def __init__(self, share: SequenceShare, mixer: Mixer, passed: bool) -> None:
        self._share, self._mixer, self._passed = share, mixer, passed
        self._group: str = share.mesh.get_group().group_name

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend as a model's mixer does.

        Args:
            q: ``[batch, heads, positions, head_dim]``.
            k: as ``q``, with as many heads or a divisor of it.
            v: as ``k``; its heads may have another width.
            documents: document of each position of the whole sequence, ``[batch, seq]``.
            sinks: score of each head's sink, ``[heads]``.
        """
        mixer, width, values = self._mixer, q.shape[-1], v.shape[-1]
        scale = width**-0.5 if mixer.scale is None else mixer.scale
        if mixer.window is not None and mixer.window < q.shape[2] * self._share.mesh.size():
            return attend_within_window(self._share, q, k, v, documents, **{**mixer.options, "sinks": sinks})
        if documents is not None or mixer.softcap is not None:
            return attend_gathered(self._share, q, k, v, documents, **{**mixer.options, "sinks": sinks})
        # Ring attention's kernels have one width for keys and values and, on GPUs, need a multiple of 8.
        padded = max(width, values) + -max(width, values) % 8
        if (width, values) != (padded, padded):
            q, k, v = (F.pad(tensor, (0, padded - tensor.shape[-1])) for tensor in (q, k, v))
        result: Tensor = ring_attention(q, k, v, sinks, scale, self._group, self._passed)[0]
        return result[..., :values] if values != padded else result


class HeadAndTail:
    """Takes a rank's share of a batch: one chunk from the front of each sequence and its mirror from the back."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._size, self._group = rank, size, group

    def __call__(self, batch: Batch) -> Batch:
        """Reduce the batch's tensors from ``[batch, seq]`` to ``[batch, seq / size]``."""
        return replace(with_positions(batch).map_sequence(self._share), sequence_group=self._group)

    def _share(self, whole: Tensor) -> Tensor:
        chunks = whole.chunk(2 * self._size, dim=1)
        return torch.cat((chunks[self._rank], chunks[-1 - self._rank]), dim=1)


def _divided(name: str, module: nn.Module, mixer: Mixer, share: SequenceShare) -> Callable[..., Tensor]:
    """Return the computation of a mixer by its own rule.

    Raises:
        UserError: the rule returns no function.
    """
    assert mixer.divided is not None  # context_parallel_check refuses the job otherwise
    forward: Callable[..., Tensor] = mixer.divided.load()(module, share)
    if not callable(forward):
        why = f"mixer {name!r}: {mixer.divided.target!r} must return a forward function, but returned {forward!r}"
        raise UserError.one("layout of the model", why, "fix the model plugin")
    return forward


def _require_no_parameters(name: str, module: nn.Module) -> None:
    """Require that a mixer gets all that it computes with as arguments, from which ranks take their share of the heads.

    Raises:
        UserError: it has parameters or buffers.
    """
    own = [own for own, _ in (*module.named_parameters(), *module.named_buffers())]
    if own:
        why = f"its layout gives it heads_dim, so that ranks may divide its heads, but it has {own[0]!r}"
        fix = "pass parameters to its forward, or leave out heads_dim"
        raise UserError.one(f"module {name!r} of the model", why, fix)


def require_causal_attention(name: str, module: nn.Module, mixer: Mixer) -> None:
    """Run the mixer, and compare it with the attention that its layout describes, which replaces it.

    Raises:
        UserError: The results differ; names the module.
    """
    if type(module) is CausalAttention:
        same = module.options == mixer.options
    else:
        same = not any(True for _ in module.parameters()) and _computes(module, mixer)
    if not same:
        shown = {option: value for option, value in mixer.options.items() if value}
        described = f"causal softmax attention{f' with {shown}' if shown else ''}"
        raise UserError.one(
            f"module {name!r} of the model",
            f"has the mixer kind causal_attention, but has parameters or does not compute {described}",
            "fix its kind in the layout's mixers, or set parallelism.context_parallel_degree = 1",
        )


def _computes(module: nn.Module, mixer: Mixer) -> bool:
    seq = 8 if mixer.window is None else mixer.window + 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, seq, 16, generator=generator, device="cpu") for heads in (4, 2, 2))
    sinks: Any = {"sinks": torch.randn(4, generator=generator, device="cpu")} if mixer.sinks else {}
    repeated = (heads.repeat_interleave(2, dim=1) for heads in (k, v))
    expected = attend(q, k, v, **{**mixer.options, "sinks": sinks.get("sinks")})
    return torch.allclose(module(q, *repeated, **sinks), expected, atol=1e-5)


class DividedMasks:
    """Makes the masks of a microbatch (:attr:`~titan_core.api.ModelPart.attention_masks`).

    Args:
        share: the ranks that divide the queries of a head.
        size: context-parallel degree: as often as a rank's tokens fit in whole sequences.
    """

    def __init__(self, share: SequenceShare, size: int) -> None:
        self._share, self._size = share, size

    def __call__(self, batch: Batch, mixers: Iterable[Mixer]) -> dict[str, Tensor | BlockMask]:
        """Return the masks by name.

        Args:
            batch: has the rank's positions.
            mixers: the model's causal attention.
        """
        mixers, length = list(mixers), batch.tokens.shape[1] * self._size
        if self._share.mesh.size() == 1:
            return attention_masks(batch, mixers, length=length)
        columns = self._share.take(torch.arange(length, device=batch.tokens.device)[None], 1)
        near = {mixer.window for mixer in mixers if mixer.window is not None and mixer.window < length}
        far = [mixer for mixer in mixers if mixer.window not in near]
        # Without documents, rings attend, for which scores that are capped need gathered keys instead.
        masks = attention_masks(batch, [mixer for mixer in far if mixer.softcap is not None], columns, length)
        if uses_block_masks(batch.tokens.device):
            for window in sorted(window for window in near if window is not None):
                masks |= self._of_chunks(batch, window, length)
        return masks

    def _of_chunks(self, batch: Batch, window: int, length: int) -> dict[str, Tensor | BlockMask]:
        """Return the masks of attention from each of the rank's chunks to the positions just before it and its own
        (:func:`~titan_parallel.window_attention.attend_within_window`)."""
        chunks = self._share.chunks
        positions = length // sum(map(len, chunks))
        halo = halo_of(chunks, self._share.mesh.get_local_rank(), positions, window)
        documents = batch.tokens.new_zeros(len(batch.tokens), length) if batch.documents is None else batch.documents
        masks = {}
        for chunk, (own, first) in enumerate(zip(self._share.own, halo.first, strict=True)):
            seen = documents[:, first : (own + 1) * positions]
            columns = torch.arange(seen.shape[1] - positions, seen.shape[1], device=seen.device)[None]
            masks[mask_name(window, chunk)] = document_mask(seen, columns, window)
        return masks
