"""All private PyTorch API that this package uses. Checked with torch 2.11 to 2.15.

* ``torch.distributed.pipelining``: ``PipelineStage._prepare_forward_infra``, ``._get_init_p2p_neighbors_ops``,
  ``._pre_metadata_inference_backup``, ``.forward_maybe_with_nosync`` and ``.backward_one_chunk``;
  ``schedules._PipelineScheduleRuntime``, the only class that runs a schedule from a CSV file.
* ``torch.ops._c10d_functional``: collectives that return their result, so that the compiler can trace them;
  ``OpOverload._op``; and ``torch._C._AutoDispatchBelowAutograd``, which skips their gradients.
* ``DTensor._local_tensor``: the public ``to_local`` takes several times the host time.
* ``torch.distributed._symmetric_memory`` and ``torch._inductor.config._micro_pipeline_tp``.
* ``torch.distributed.distributed_c10d._resolve_process_group``: operators take the names of process groups.
* ``torch.ops.aten._scaled_dot_product_*`` and ``torch._fused_sdp_choice``: ring attention merges the results of fused
  kernels by their logsumexp, which ``scaled_dot_product_attention`` does not return.
* ``torch.ops.aten._scaled_dot_product_*``, ``torch.ops.aten._scaled_mm`` and its relatives, and
  ``torch.ops._c10d_functional``: operators that recomputation recognises.
* ``torch._functorch.config.activation_memory_budget``.
* ``torch.utils._python_dispatch``, ``torch._C._SetExcludeDispatchKeyGuard`` and
  ``Tensor._version``: torch's own selective checkpointing uses them too.
* ``torch._foreach_copy_``.
* ``torch._C._autograd._top_saved_tensors_default_hooks``, as ``torch.utils.checkpoint`` uses it, and ``Tensor._base``.
* ``nn.Module._parameters``: ``get_parameter`` reads through attributes, which properties may hide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from titan_core.api.parallel.step import shape_inference
from titan_core.toolkit.random_state import same_generators

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti
else:
    PipelineStage = object  # importing torch.distributed.pipelining takes 2 s, and only pipelines need it

_ATEN = torch.ops.aten
MATMULS: Final = frozenset(
    operator.default
    for operator in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN._scaled_mm,
        _ATEN._scaled_mm_v2,
        _ATEN._grouped_mm,
        _ATEN._scaled_grouped_mm,
        _ATEN._scaled_grouped_mm_v2,
    )
)
"""Matrix multiplications in all precisions, and those of experts."""
SAVED_OPERATORS: Final = frozenset(
    (
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.higher_order.flex_attention,
        torch.ops.higher_order.inductor_compiled_code,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
        _ATEN.topk.default,
    )
)
"""Operators whose results selective recomputation saves in every model: attention (FlexAttention called outside compiled
blocks is a compiled region), the collectives of tensor and expert parallelism, and the choice of experts, which must not
change."""
_ALL_GATHER: Final = torch.ops._c10d_functional.all_gather_into_tensor.default
_ALL_REDUCE: Final = torch.ops._c10d_functional.all_reduce.default
_ALL_TO_ALL: Final = torch.ops._c10d_functional.all_to_all_single.default
_REDUCE_SCATTER: Final = torch.ops._c10d_functional.reduce_scatter_tensor.default
_WAIT: Final = torch.ops._c10d_functional.wait_tensor.default


class StageFixes(PipelineStage):
    """Mixin to put before ``PipelineStage``: works around its bugs, and lets two adjacent stages share a rank, as in V
    schedules."""

    def _prepare_forward_infra(self, *arguments: Any, **keywords: Any) -> Any:
        """Infer shapes by running the modules on zeros.

        Restores the random generators and the buffers afterwards. torch restores buffers since 2.15.
        """
        torch_restores = hasattr(self, "_pre_metadata_inference_backup")
        buffers = [] if torch_restores else [(buffer, buffer.clone()) for buffer in self.submod.buffers()]
        with shape_inference(), same_generators():
            outputs = super()._prepare_forward_infra(*arguments, **keywords)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return outputs

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Drop operations that send to this rank itself, which gloo does not support. Only torch 2.11 calls this."""
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [op for op in ops if op.peer != dist.get_rank()]

    def forward_maybe_with_nosync(self, *arguments: Any, **keywords: Any) -> Any:
        """Copy an output that is a view, such as that of a block that ends with an auxiliary loss.

        Zero-bubble schedules detach outputs in place after the backward pass for inputs, and views cannot be.
        """
        output = super().forward_maybe_with_nosync(*arguments, **keywords)  # type: ignore[no-untyped-call]
        return output.clone() if isinstance(output, Tensor) and output._base is not None else output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Let go of the graph behind the loss after the backward pass.

        The schedule keeps the losses until the step ends, and their graphs keep what the last stage received for each
        microbatch.
        """
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
        if loss is not None and full_backward and loss._base is None:
            loss.detach_()

    def backward_maybe_with_nosync(self, backward_type: str, *arguments: Any, **keywords: Any) -> Any:
        """Gather FSDP's parameters before a backward pass for inputs only or weights only.

        torch looks for ``submod.parameters()`` in the autograd graph. Resharded parameters are not in it, and torch then
        silently skips their gradients.
        """
        if backward_type != "full":
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        return super().backward_maybe_with_nosync(backward_type, *arguments, **keywords)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return nothing during evaluation, whose schedule still contains the (empty) backward passes."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Do nothing during evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def schedule_from_csv(path: str, stages: list[Any], microbatches: int, **options: Any) -> PipelineScheduleMulti:
    """Return the schedule in the CSV file ``path`` for this rank's ``stages``."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(stages, microbatches, **options)
    runtime._load_csv(path)
    return runtime


def all_gather(shard: Tensor, ranks: int, group: str) -> Tensor:
    """Return the ranks' ``shard``, contiguous, one after another in dimension 0. Has no gradient.

    Args:
        ranks: number of ranks of ``group``.
    """
    return _waited(_ALL_GATHER, shard, ranks, group)


def start_all_gather(shard: Tensor, ranks: int, group: str) -> Tensor:
    """Start :func:`all_gather` and return its result for :func:`wait`. Not while compiling."""
    with torch._C._AutoDispatchBelowAutograd():
        result: Tensor = _ALL_GATHER(shard, ranks, group)
    return result


def start_all_gather_rows(shards: Tensor, ranks: int, group: str) -> Callable[[], Tensor]:
    """Start :func:`all_gather` of each row of ``shards``, ``[rows, shard, ...]`` to ``[rows, ranks * shard, ...]``, without
    a copy. Return a function that waits for the result. Not while compiling.

    Args:
        shards: contiguous.
    """
    rows, length, *rest = shards.shape
    result = shards.new_empty(rows, ranks * length, *rest)
    gather, gathering_group = dist.all_gather_into_tensor, process_group(group)
    works = [gather(*pair, gathering_group, async_op=True) for pair in zip(result, shards, strict=True)]

    def waited() -> Tensor:
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()
        return result

    return waited


def reduce_scatter(addend: Tensor, ranks: int, group: str) -> Tensor:
    """Return this rank's shard, in dimension 0, of the sum of the ranks' ``addend``, contiguous. Has no gradient."""
    return _waited(_REDUCE_SCATTER, addend, "sum", ranks, group)


def start_reduce_scatter(addend: Tensor, ranks: int, group: str) -> Tensor:
    """Start :func:`reduce_scatter` and return its result for :func:`wait`. Not while compiling."""
    with torch._C._AutoDispatchBelowAutograd():
        result: Tensor = _REDUCE_SCATTER(addend, "sum", ranks, group)
    return result


def wait(result: Tensor) -> Tensor:
    """Return the result of a collective that has been started."""
    with torch._C._AutoDispatchBelowAutograd():
        waited: Tensor = _WAIT(result)
    return waited


def all_to_all(rows: Tensor, group: str) -> Tensor:
    """Return, from each rank in order, the row that it holds for this rank. Has no gradient.

    Args:
        rows: contiguous, ``[ranks, ...]``: a row for each rank.
    """
    ones = [1] * len(rows)
    return exchange_rows(rows, ones, ones, group)


def exchange_rows(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """Return the rows that the ranks send to this one, in the order of the ranks. Has no gradient.

    Args:
        rows: contiguous; those for the first rank, then those for the next.
        received: number of rows from each rank.
        sent: number of rows for each rank.
    """
    return _waited(_ALL_TO_ALL, rows, received, sent, group)


def all_reduce(addend: Tensor, group: str) -> Tensor:
    """Return the sum of the ranks' ``addend``, contiguous, as a new tensor. Has no gradient."""
    return _waited(_ALL_REDUCE, addend, "sum", group)


def _waited(collective: Any, *arguments: Any) -> Tensor:
    result: Tensor
    if torch.compiler.is_compiling():
        result = _WAIT(collective(*arguments))
        return result
    # torch's own gradients of these operators are Python code, which takes longer than the operators (torch 2.15). ``_op``
    # is the operator itself, without another call in Python.
    with torch._C._AutoDispatchBelowAutograd():
        result = _WAIT._op(collective._op(*arguments))
    return result


def local_tensor(tensor: DTensor) -> Tensor:
    """Return the shard that ``tensor`` holds, without a gradient."""
    return tensor._local_tensor


def is_whole_view(tensor: Tensor, whole: Tensor) -> bool:
    """Whether ``tensor`` is ``whole`` or a view of it with the same elements in the same order."""
    base = tensor if tensor._base is None else tensor._base
    return base is whole and tensor.numel() == whole.numel() and tensor.dtype == whole.dtype and tensor.is_contiguous()


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost ``torch.autograd.graph.saved_tensors_hooks`` that are active, which saving a tensor calls."""
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of ``sources`` into the tensor of ``targets`` at its place, all in a few kernels."""
    torch._foreach_copy_(targets, sources)


def overlap_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Make inductor overlap the collectives of ``group`` with matmuls through symmetric memory. CUDA only."""
    import torch._inductor.config  # takes 2 s
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    if not hasattr(enable_symm_mem_for_group, "__deprecated__"):  # later versions need no call, and warn of it
        enable_symm_mem_for_group(group.group_name)


class AttentionKernel:
    """A fused attention kernel, forward and backward, for ``[batch, heads, seq, head_dim]`` tensors.

    Of CUDA's kernels only the operators' shapes are checked without a GPU. Those of the memory-efficient kernel pad the
    logsumexp to a multiple of 32 queries, and those of cuDNN give it another dimension.
    """

    def __init__(self, name: str) -> None:
        aten = torch.ops.aten
        self.name = name
        """As in the operator's name."""
        self._forward = getattr(aten, f"_scaled_dot_product_{name}").default
        self._backward = getattr(aten, f"_scaled_dot_product_{name}_backward").default

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return the result and its logsumexp, fp32, ``[batch, heads, seq]``."""
        k, v = self._keys(q, k), self._keys(q, v)
        needed = (None, True) if self.name in (_EFFICIENT, _CUDNN) else ()  # no bias; compute the logsumexp
        out, logsumexp, *_ = self._forward(q, k, v, *needed, 0.0, causal, scale=scale)
        return out, logsumexp.view(*logsumexp.shape[:2], -1)[:, :, : q.shape[2]]

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``q``, ``k`` and ``v``. ``logsumexp`` must be contiguous."""
        keys, values = self._keys(q, k), self._keys(q, v)
        lengths = (None, None, q.shape[2], k.shape[2])
        # The state of the dropout, which these kernels do not read without dropout.
        state = [q.new_empty((), dtype=torch.int64) for _ in range(2)]
        if self.name == _CPU:
            rest: tuple[Any, ...] = (out, logsumexp, 0.0, causal)
        elif self.name == _FLASH:
            state = [q.new_empty(size, dtype=torch.uint64) for size in ((2,), ())]
            rest = (out, logsumexp, *lengths, 0.0, causal, *state)
        elif self.name == _CUDNN:
            rest = (out, logsumexp.unsqueeze(-1), *state, None, *lengths, 0.0, causal)
        else:
            padded = F.pad(logsumexp, (0, -q.shape[2] % 32), value=float("inf"))
            rest = (None, out, padded, *state, 0.0, [True, True, True, False], causal)
        of_q, of_k, of_v, *_ = self._backward(gradient, q, keys, values, *rest, scale=scale)
        return of_q, _sum_groups(of_k, k), _sum_groups(of_v, v)

    def _keys(self, q: Tensor, k: Tensor) -> Tensor:
        """Return ``k`` with a head for each head of ``q`` if the kernel has no grouped heads."""
        return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if self.name == _EFFICIENT else k


def _sum_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over the heads of each group of ``like``, if it has one for each head."""
    if gradient.shape[1] == like.shape[1]:
        return gradient
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


_CPU, _FLASH, _EFFICIENT, _CUDNN = "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"


def attention_kernel(q: Tensor, k: Tensor) -> AttentionKernel:
    """Return the kernel that ``scaled_dot_product_attention`` would choose for causal attention of ``q`` to ``k``, or, where
    torch cannot choose (fake tensors), flash attention for half precision."""
    if q.device.type == "cpu":
        return AttentionKernel(_CPU)
    choice = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=q.shape[1] != k.shape[1])
    half = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
    return AttentionKernel(_BACKENDS.get(SDPBackend(choice), _FLASH if half else _EFFICIENT))


_BACKENDS = {
    SDPBackend.FLASH_ATTENTION: _FLASH,
    SDPBackend.EFFICIENT_ATTENTION: _EFFICIENT,
    SDPBackend.CUDNN_ATTENTION: _CUDNN,
}


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group called ``name``."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def set_activation_memory_budget(share: float) -> None:
    """Set the share of activations that inductor may keep for backward in blocks that it compiles from now on."""
    torch._functorch.config.activation_memory_budget = share


def detach_with_version(tensor: Tensor) -> Tensor:
    """Detach ``tensor``, sharing its version counter even inside a dispatch mode, which excludes the key that shares it."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes to the memory of ``tensor``."""
    return tensor._version


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter registered as ``name`` on ``module`` itself."""
    return module._parameters[name]
