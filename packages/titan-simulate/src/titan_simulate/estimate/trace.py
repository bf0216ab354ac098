"""Records the last step of a simulated rank as :class:`~titan_simulate.estimate.work.Work`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_simulate.engine.grouped import grouped_product
from titan_simulate.engine.names import is_grouped, is_varlen
from titan_simulate.engine.observation import HOST_WAIT, Observation, Operation
from titan_simulate.engine.result import BETWEEN_STEPS
from titan_simulate.engine.tensors import storage_key, tensors_in
from titan_simulate.estimate.block_classes import unit_of
from titan_simulate.estimate.work import Action, Data, Kind, Work
from titan_simulate.torch_private import process_group_of

_OVERWRITTEN = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_"})
_ROWS = frozenset({"embedding", "index", "index_select", "gather", "embedding_dense_backward", "index_put_", "scatter_add_"})
"""Read or write only the rows, or elements, that indices select."""
_WAITS = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
"""The second one waits when its result is read (torch 2.15), which no operator shows: it counts as waiting at once."""
_TYPES = {
    torch.float64: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.float4_e2m1fn_x2: "nvfp4",
}  # fmt: skip


class Trace:
    """An observer of operations that keeps the last step."""

    def __init__(
        self,
        compiled: Callable[[str], bool] = lambda module: False,
        action: Callable[[], Action | None] = lambda: None,
        window: Callable[[str], int | None] = lambda module: None,
        blocks: str = "layers",
    ) -> None:
        """
        Args:
            window: positions that a query of an attention module (by name) sees; ``None``: all before its own.
            compiled: whether ``torch.compile`` would compile the code of a module (by name).
            action: returns the action of the pipeline's schedule that runs.
            blocks: name of the module whose children are the model's blocks.
        """
        self.work: list[Work] = []
        self._compiled, self._action, self._window, self._blocks = compiled, action, window, blocks
        self._phase = "start"
        self._position: dict[int, int] = {}  # number of an operation -> position in the trace
        self._storages: dict[int, int] = {}  # address of a storage -> its number
        self._numbered = 0
        self._made_by: dict[int, int] = {}  # number of a storage -> position of the functional collective that fills it
        self._pending: dict[int, int] = {}  # the same of other ones, for which whatever uses the storage waits
        self._last: dict[str, int] = {}

    def attach(self, observation: Observation) -> None:
        """See :class:`~titan_simulate.engine.observation.OperationObserver`."""

    def __call__(self, operation: Operation) -> None:
        """See :class:`~titan_simulate.engine.observation.OperationObserver`."""
        if operation.phase == BETWEEN_STEPS:
            self._number_results(operation)
            self._phase = BETWEEN_STEPS
            return
        if operation.phase == "forward" and self._phase in ("start", "end of step", BETWEEN_STEPS):
            self._begin()
        self._phase = operation.phase
        if operation.view or (operation.name == HOST_WAIT and operation.phase not in ("forward", "backward")):
            return  # what waits after the last microbatch does so in logged steps only
        short = operation.name.rpartition("::")[2].partition(".")[0]  # higher-order operators have no namespace
        if operation.number < 0 or short in ("monitored_barrier",):
            self._number_results(operation)
            return
        reads, writes = self._data(operation, short)
        after = [self._position[number] for number in operation.after if number in self._position]
        after += [self._pending[one.storage] for one in {*reads, *writes} if one.storage in self._pending]
        position, stream = len(self.work), str(operation.stream)
        keywords: dict[str, Any] = {}
        kind = self._kind(operation, short)
        if short in _WAITS:
            kind = Kind.WAIT
            after += [self._made_by[one.storage] for one in reads if one.storage in self._made_by]
            reads = writes = ()
        elif kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE):
            assert operation.collective is not None
            group, ranks = _group([*operation.args, *operation.keywords.values()])
            if kind is not Kind.COLLECTIVE:
                ranks = (int(next(one for one in operation.args if isinstance(one, int))),)
            functional = not operation.name.startswith("c10d::")
            if functional or _argument(operation, "async_op"):  # runs on a stream of its own until it is waited for
                if stream in self._last:
                    after.append(self._last[stream])
                stream = f"{group} collectives"
                made = self._made_by if functional else self._pending
                made |= {one.storage: position for one in writes}
            keywords = {"ranks": ranks, "group": operation.collective.group, "bytes": operation.collective.bytes}
            keywords["permutes"] = kind is Kind.COLLECTIVE and _permutes(operation, ranks)
        elif kind is Kind.MATMUL:
            keywords = _matmul(operation)
        elif kind is Kind.ATTENTION:
            causal = _is_causal(operation)
            share = _visible_share(operation, self._window(operation.module)) if causal else 1.0
            keywords = {"flops": int(operation.flops * share), "causal": causal}
        # FSDP gathers and reduces in hooks of modules, outside of their compiled code.
        compiled = not operation.composed and not operation.name.startswith(("fsdp::", "c10d::"))
        self._position[operation.number] = position
        self._last[stream] = position
        self.work.append(
            Work(
                kind, operation.name, operation.phase, operation.module, stream, tuple(after), reads, writes,
                max(1, operation.launches), compiled=compiled and self._compiled(operation.module),
                action=self._action(), recomputed=operation.recomputed, unit=unit_of(operation.module, self._blocks),
                **keywords,
            )
        )  # fmt: skip

    def _begin(self) -> None:
        self.work, self._position, self._made_by, self._pending, self._last = [], {}, {}, {}, {}

    def _kind(self, operation: Operation, short: str) -> Kind:
        if operation.name == HOST_WAIT:
            return Kind.HOST_WAIT
        if operation.collective is not None:
            return {"send": Kind.SEND, "recv_": Kind.RECEIVE}.get(short, Kind.COLLECTIVE)
        if operation.flops:
            return Kind.ATTENTION if "attention" in short or is_varlen(short) else Kind.MATMUL
        devices = {one.device.type for one in tensors_in((operation.args, operation.keywords, operation.result))}
        if devices == {"cpu"}:
            return Kind.HOST
        if "cpu" in devices and short in ("copy_", "_to_copy"):
            return Kind.HOST_COPY
        return Kind.POINTWISE

    def _number_results(self, operation: Operation) -> None:
        """Give new storages a number: addresses are used again."""
        known = {storage_key(one.untyped_storage()) for one in tensors_in((operation.args, operation.keywords))}
        for one in tensors_in(operation.result):
            key = storage_key(one.untyped_storage())
            if key not in known:
                self._numbered += 1
                self._storages[key] = self._numbered

    def _data(self, operation: Operation, short: str) -> tuple[tuple[Data, ...], tuple[Data, ...]]:
        self._number_results(operation)
        sources = tensors_in((operation.args, operation.keywords))
        results = tensors_in(operation.result)
        mutated = list(_mutated(operation))
        if short in _OVERWRITTEN or "out" in operation.keywords:
            sources = [one for one in sources if all(one is not other for other in mutated)]
        written = {self._of(one).storage: self._of(one) for one in (*results, *mutated)}
        read = [self._of(one) for one in sources]
        if short in _ROWS:
            size = min(sum(one.bytes for one in written.values()), min((one.bytes for one in read), default=0) * 2**20)
            if short in ("embedding_dense_backward", "index_put_", "scatter_add_"):
                size = max((one.bytes for one in read), default=0) if short == "embedding_dense_backward" else size
            read = [Data(one.storage, min(one.bytes, size)) for one in read]
        if is_grouped(short):
            return self._of_groups(operation, read), self._of_groups(operation, written.values())
        return tuple(read), tuple(written.values())

    def _of_groups(self, operation: Operation, data: Iterable[Data]) -> tuple[Data, ...]:
        """Return ``data`` without the rows that belong to no group, which a grouped product neither reads nor writes."""
        product = grouped_product(operation.args, operation.keywords)
        factors = tensors_in((operation.args[:2], operation.result))
        padded = [self._of(one).storage for one in factors if one.dim() == 2]
        share = product.counted / max(1, product.length)
        return tuple(Data(one.storage, int(one.bytes * share)) if one.storage in padded else one for one in data)

    def _of(self, tensor: Tensor) -> Data:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._storages:
            self._numbered += 1
            self._storages[key] = self._numbered
        return Data(self._storages[key], min(tensor.nbytes, storage.nbytes()))


def _mutated(operation: Operation) -> Iterator[Tensor]:
    """Yield the arguments that an operator writes."""
    schema = getattr(operation.operator, "_schema", None)
    if schema is None:
        return
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = operation.args[number] if number < len(operation.args) else operation.keywords.get(argument.name)
            yield from tensors_in(value)


def _is_causal(operation: Operation) -> bool:
    if getattr(operation.operator, "_schema", None) is None or is_varlen(operation.name):
        return True  # attention within documents is causal
    return bool(_argument(operation, "is_causal"))


def _visible_share(operation: Operation, window: int | None) -> float:
    """Return the share of all pairs of queries and keys that a causal mask lets a query see, half without a window.

    Kernels with masks of their own skip blocks outside of a window; those with a causal flag are called without one.
    """
    packed = is_varlen(operation.name)
    keys = max((one.shape[2] for one in tensors_in(operation.args) if one.dim() == 4), default=0)
    keys = _argument(operation, "max_k") if packed else keys
    flagged = getattr(operation.operator, "_schema", None) is not None and not packed
    if window is None or window >= keys or flagged:
        return 0.5
    return window / keys * (1 - (window - 1) / (2 * keys))


def _permutes(operation: Operation, ranks: Sequence[int]) -> bool:
    """Whether an exchange sends all to one other rank."""
    sizes = _argument(operation, "input_split_sizes") or ()
    receivers = [rank for rank, size in zip(ranks, sizes, strict=False) if size]
    return len(receivers) == 1 and receivers[0] != dist.get_rank()


def _argument(operation: Operation, name: str) -> Any:
    """Return an argument of an operator; ``None`` if it takes none of this name, or has its default."""
    schema = getattr(operation.operator, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if name not in names:
        return None
    number = names.index(name)
    return operation.args[number] if number < len(operation.args) else operation.keywords.get(name)


def _matmul(operation: Operation) -> dict[str, Any]:
    factors = [one for one in tensors_in(operation.args) if one.dim() in (2, 3)]
    if "add" in operation.name:
        factors = [one for one in tensors_in(operation.args[1:]) if one.dim() in (2, 3)]
    kind = _TYPES.get(factors[0].dtype, "bf16") if factors else "bf16"
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    scales = tensors_in((operation.args, operation.keywords))
    if kind == "fp8" and any(one.dtype is torch.float8_e8m0fnu for one in scales):  # a power of two for each block
        kind = "mxfp8"
    sizes = (1, 1, 1, 1)
    if is_grouped(operation.name):
        product = grouped_product(operation.args, operation.keywords)
        sizes = product.groups, product.rows, product.inner, product.columns
    elif len(factors) >= 2:
        left, right = factors[0], factors[1]
        batch = left.shape[0] if left.dim() == 3 else 1
        packed = 2 if kind == "nvfp4" else 1  # numbers in a byte
        sizes = int(batch), int(left.shape[-2]), packed * int(left.shape[-1]), int(right.shape[-1])
    return {"flops": operation.flops, "type": kind, "sizes": sizes}


def _group(arguments: Sequence[Any]) -> tuple[str, tuple[int, ...]]:
    for argument in arguments:
        group = process_group_of(argument)
        if group is not None:
            return _ranks(group)
    return _ranks(None)


@lru_cache(maxsize=256)
def _ranks(group: dist.ProcessGroup | None) -> tuple[str, tuple[int, ...]]:
    if group is None:
        return "default_pg", tuple(range(dist.get_world_size()))
    return group.group_name, tuple(dist.get_process_group_ranks(group))
