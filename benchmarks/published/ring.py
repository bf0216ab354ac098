"""The ring attention of TorchTitan's published runs: that of ``torch.distributed.tensor.experimental`` at the end of 2024.

It stands in for Titan's in :mod:`benchmarks.published.estimated`. Under ``torch.compile`` nothing hid its communication,
and it moved more:

* keys and values were repeated to a head for each query head before attention, so that ``n_heads / n_kv_heads`` times as
  many bytes passed between ranks;
* forward, recomputation and backward each gathered all keys and values;
* backward passed the gradients of keys and values around the whole ring in fp32, one rank at a time;
* the results of the steps were merged operator by operator, in fp32.

The chunks that a rank attends to are the same as Titan's. Numbers are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import ModelPart, TrainingContext
from titan_core.toolkit.simulation import COMPOSED
from titan_simulate.torch_private import process_group_of

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
"""The operators behind ``scaled_dot_product_attention``, whose logsumexp a ring merges."""


def stand_in_for_rings(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    """Let simulations in this process run these operators in place of those of titan-parallel, if the transforms before this
    one have loaded them. Returns ``part``."""
    for operator in list(COMPOSED):
        COMPOSED[operator] = _STAND_INS.get(operator.name(), COMPOSED[operator])
    return part


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, group: str, passed: bool
) -> tuple[Tensor, Tensor]:
    """Arguments and results are those of ``titan_parallel::ring_attention``, without sinks."""
    assert sinks is None
    ranks = _group(group)
    keys, values = _gathered(_repeated(k, q), _repeated(v, q), ranks)
    merged = torch.empty_like(q, dtype=torch.float32)
    logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
    for step in range(ranks.size()):
        held = (ranks.rank() - step) % ranks.size()
        queries, seen = _parts(step, ranks.rank(), q.shape[2])
        part, scores, *_ = FLASH(
            q[:, :, queries], keys[held][:, :, seen], values[held][:, :, seen], 0.0, step == 0, scale=scale
        )
        if step == 0:
            merged.copy_(part)
            logsumexp.copy_(scores)
            continue
        before, known = merged[:, :, queries], logsumexp[:, :, queries]
        weight = torch.sigmoid((scores - known).unsqueeze(-1))
        before.copy_(before - weight * (before - part.float()))
        known.copy_(known - F.logsigmoid(known - scores))
    return merged.to(q.dtype), logsumexp


def _attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    group: str,
    passed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and results are those of ``titan_parallel::ring_attention_backward``, without sinks."""
    assert sinks is None
    ranks = _group(group)
    own = _repeated(k, q), _repeated(v, q)
    keys, values = _gathered(*own, ranks)
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    sums = torch.zeros(2, *own[0].shape, dtype=torch.float32, device=q.device)
    state = [q.new_empty(size, dtype=torch.uint64) for size in ((2,), ())]
    for step in range(ranks.size()):
        held = (ranks.rank() - step) % ranks.size()
        queries, seen = _parts(step, ranks.rank(), q.shape[2])
        of_q, of_k, of_v = FLASH_BACKWARD(
            gradient[:, :, queries], q[:, :, queries], keys[held][:, :, seen], values[held][:, :, seen],
            out[:, :, queries], logsumexp[:, :, queries], None, None, q.shape[2], k.shape[2], 0.0, step == 0, *state,
            scale=scale,
        )  # fmt: skip
        grad_q[:, :, queries] += of_q
        for total, part in zip(sums, (of_k, of_v), strict=True):
            total[:, :, seen] += part
        sums = _passed_on(sums, ranks)
    grad_k, grad_v = (total.to(k.dtype).unflatten(1, (k.shape[1], -1)).sum(2) for total in sums)
    return grad_q.to(q.dtype), grad_k, grad_v, q.new_empty(0)


def _group(name: str) -> dist.ProcessGroup:
    group = process_group_of(name)
    assert group is not None, f"no process group is called {name!r}"
    return group


def _repeated(tensor: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with a head for each head of ``q``."""
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def _gathered(k: Tensor, v: Tensor, ranks: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of all ranks, ``[ranks, batch, heads, positions, head_dim]``."""
    own = torch.stack((k, v))
    whole = own.new_empty(ranks.size() * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(whole, own, group=ranks)
    keys, values = whole.unflatten(0, (-1, len(own))).unbind(1)
    return keys, values


def _parts(step: int, rank: int, length: int) -> tuple[slice, slice]:
    """Return the queries that see keys of the rank that is ``step`` ranks before this one, and the keys that they see."""
    whole, front, back = slice(None), slice(0, length // 2), slice(length // 2, length)
    if step == 0:
        return whole, whole
    return (whole, front) if step <= rank else (back, whole)


def _passed_on(tensor: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Send ``tensor`` to the next rank, and return that of the previous one. Nothing runs meanwhile."""
    rank, size, rows = ranks.rank(), ranks.size(), len(tensor)
    received = torch.empty_like(tensor)
    outgoing = [rows * (other == (rank + 1) % size) for other in range(size)]
    incoming = [rows * (other == (rank - 1) % size) for other in range(size)]
    dist.all_to_all_single(received, tensor, incoming, outgoing, group=ranks)
    return received


_STAND_INS: dict[str, Callable[..., Any]] = {
    "titan_parallel::ring_attention": _attend,
    "titan_parallel::ring_attention_backward": _attend_backward,
}
"""By name: a plugin imports no other."""
