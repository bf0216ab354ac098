"""Observes a simulated rank: memory, collectives, launches and arithmetic, by phase.

:meth:`Observation.seen` receives every operator on the device. What its shapes determine (:class:`_Facts`) is found once for
operators that are remembered. The rest depends on when it runs: the phase of the step and the module, which say to whom the
memory of its results belongs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from titan_simulate.engine.grouped import grouped_product
from titan_simulate.engine.memory import DeviceMemory
from titan_simulate.engine.modules import ModuleTracker, in_backward
from titan_simulate.engine.names import is_grouped, is_varlen
from titan_simulate.engine.operator_cache import Found
from titan_simulate.engine.result import Collective, Owner
from titan_simulate.engine.streams import StreamOrder
from titan_simulate.engine.tensors import is_view, storage_key, tensors_in
from titan_simulate.torch_private import fake_device, process_group_of

_COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::")
_NOT_COMMUNICATION = ("wait_tensor", "_wrap_tensor", "monitored_barrier")
_OF_LISTS = ("c10d::allreduce_", "c10d::allgather_", "c10d::reduce_scatter_")
_NO_KERNEL = frozenset(
    {
        "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_",
        "record_stream", "_reshape_alias", "as_strided", "view", "_unsafe_view", "is_pinned", "resize_",
    }
)  # fmt: skip
HOST_WAIT = "the host waits"
"""Name of the operation in which the host waits for all that it has issued on the current stream."""
TENSORS_PER_LAUNCH = 64
"""How many tensors one kernel of a foreach operator handles, about."""


@dataclass(slots=True)
class Operation:
    """An operator on the simulated device."""

    operator: Any
    """The operator overload."""
    name: str
    """``"aten::mm"``."""
    phase: str
    module: str
    """Name of the module that computes, ``""`` if none does."""
    args: Sequence[Any]
    keywords: dict[str, Any]
    result: Any
    flops: int
    launches: int
    collective: Collective | None
    """One call, if it is one."""
    number: int
    """Operators are numbered in the order in which the host issues them."""
    stream: int
    """The stream on which it runs."""
    after: tuple[int, ...]
    """Numbers of the operators of other streams that it waits for."""
    view: bool = False
    """Whether its result is a view of its argument, so that it neither computes nor allocates."""
    composed: bool = False
    """Whether it is a part of a custom operator, into which compilers do not look."""
    recomputed: bool = False
    """Whether a backward pass repeats it because its result was not kept."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What shapes determine of an operator."""

    name: str
    view: bool
    collective: Collective | None
    launches: int
    flops: int
    fsdp: bool


class OperationObserver(Protocol):
    """Receives every operator on the simulated device. It must not keep tensors."""

    def __call__(self, operation: Operation) -> None:
        """Observe ``operation``."""
        ...

    def attach(self, observation: Observation) -> None:
        """Called once, before the first operation."""
        ...


class Observation:
    """Everything that is counted while a rank is simulated."""

    def __init__(self, observers: Iterable[OperationObserver] = ()) -> None:
        self.memory, self.host_memory = DeviceMemory(traced=True), DeviceMemory()
        self.modules = ModuleTracker()
        self.streams = StreamOrder()
        self._observers = list(observers)
        for observer in self._observers:
            observer.attach(self)
        self._phase = "start"
        self._collectives: dict[tuple[str, str, int, str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._launches: Counter[str] = Counter()
        self._flops: Counter[str] = Counter()
        self._groups: dict[Any, tuple[str, int]] = {}

    def enter(self, phase: str) -> None:
        """Begin ``phase``."""
        self._phase = phase
        self.memory.enter(phase)

    def seen(
        self,
        operator: Any,
        args: Sequence[Any],
        keywords: dict[str, Any],
        result: Any,
        found: Found | None = None,
        composed: bool = False,
    ) -> None:
        """Observe an operator on the device (:data:`~titan_simulate.engine.fake_device.Seen`)."""
        facts: _Facts | None = None if found is None else found.facts
        if facts is None:
            facts = self._facts(operator, args, keywords, result)
            if found is not None:
                found.facts = facts
        if facts.view and not self._observers:
            return
        self._follow_phase()
        module, collective = self.modules.current, facts.collective
        if not facts.view:
            made = tensors_in(result) if found is None else [_item(result, number) for number, *_ in found.new]
            self._note_results(made, facts, module)
        if collective is not None:
            collective = replace(collective, phase=self._phase)
            self._count_collective(collective, args, keywords)
        if facts.fsdp:
            self._follow_fsdp(facts.name, args, keywords)
        self._launches[self._phase] += facts.launches
        # How many rows belong to a group is a matter of values.
        flops = grouped_product(args, keywords).flops if is_grouped(facts.name) else facts.flops
        self._flops[self._phase] += flops
        if self._observers:
            order = self.streams.issue() if facts.launches or collective is not None else (-1, -1, ())
            operation = Operation(
                operator, facts.name, self._phase, module, args, keywords, result, flops, facts.launches, collective,
                *order, facts.view, composed, self.modules.recomputes,
            )  # fmt: skip
            for observer in self._observers:
                observer(operation)

    def waited(self) -> None:
        """Observe that the host waits for the current stream."""
        if self._observers:
            self._follow_phase()
            order = self.streams.issue()
            operation = Operation(None, HOST_WAIT, self._phase, self.modules.current, (), {}, None, 0, 1, None, *order)
            for observer in self._observers:
                observer(operation)

    def _follow_phase(self) -> None:
        """Enter forward or backward, which no hook announces: a microbatch goes through both."""
        if self._phase == "forward" and in_backward():
            self.enter("backward")
        elif self._phase == "backward" and not in_backward():
            self.enter("forward")

    def _note_results(self, made: Iterable[Tensor], facts: _Facts, module: str) -> None:
        """Count the memory of the tensors that an operator has made."""
        if facts.collective is not None:
            owner = Owner.COMMUNICATION
        elif self.modules.is_head(module):
            owner = Owner.LOSS
        else:
            owner = Owner.ACTIVATIONS if self._phase in ("forward", "backward") else Owner.OTHER
        for tensor in made:
            memory = self.memory if fake_device(tensor).type == "cuda" else self.host_memory
            memory.note(tensor, facts.name, module, owner)

    def _count_collective(self, collective: Collective, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Count a call, whose arguments are buffers of communication unless they have another owner for good."""
        for tensor in tensors_in((args, keywords)):
            self.memory.own(tensor, Owner.COMMUNICATION, only_if=(Owner.OTHER, Owner.ACTIVATIONS, Owner.LOSS))
        calls = self._collectives[
            collective.operator, collective.group, collective.ranks, collective.device, collective.phase
        ]
        calls[0] += 1
        calls[1] += collective.bytes

    def _facts(self, operator: Any, args: Sequence[Any], keywords: dict[str, Any], result: Any) -> _Facts:
        name = operator.name()
        # contiguous() and reshape() are views by their signature, but copy now and then.
        view = is_view(operator) and _shares_storage(result, (args, keywords))
        collective = self._collective(name, args, keywords, result)
        launches = 0 if view or collective is not None else _launches(name, args)
        count = flop_registry.get(getattr(operator, "overloadpacket", operator))
        if "attention" in name:
            args = _with_equal_heads(args, raw=not name.startswith("aten::"))
        if is_varlen(name):
            flops = _varlen_flops(name, args)
        elif name.startswith("aten::_scaled_mm_v2"):  # for which torch 2.15 has no formula
            flops = 2 * result.numel() * args[0].shape[1] * (2 if args[0].dtype is torch.float4_e2m1fn_x2 else 1)
        else:
            flops = 0 if count is None else int(count(*args, **keywords, out_val=result))
        return _Facts(name, view, collective, launches, flops, name.startswith("fsdp::"))

    def _follow_fsdp(self, name: str, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        """FSDP copies what it has gathered into whole parameters, and whole gradients into what it reduces."""
        if name == "fsdp::split_with_sizes_copy":
            for tensor in tensors_in(keywords.get("out", args[3:])):
                self.memory.note(tensor, name, self.modules.current)
                self.memory.own(tensor, Owner.GATHERED)
        elif name == "fsdp::chunk_cat":
            for tensor in tensors_in(args[:1]):
                self.memory.own(tensor, Owner.GRADIENTS)
            for tensor in tensors_in(keywords.get("out")):
                self.memory.own(tensor, Owner.COMMUNICATION)

    def _collective(self, name: str, args: Sequence[Any], keywords: dict[str, Any], result: Any) -> Collective | None:
        """Return one call of a collective; ``None`` if the operator is none."""
        if not name.startswith(_COLLECTIVES) or any(word in name for word in _NOT_COMMUNICATION):
            return None
        given, made = tensors_in((args, keywords)), tensors_in(result)
        tensors = [*given, *made]
        group, ranks = self._group([*args, *keywords.values()])
        if name.startswith("c10d::"):
            size = _bytes_of_c10d(name, args, given, tensors)
        else:
            size = max(_nbytes(given), _nbytes(made))
        device = tensors[0].device.type if tensors else "cpu"
        return Collective(name, group, ranks, device, self._phase, 1, size)

    def _group(self, arguments: Iterable[Any]) -> tuple[str, int]:
        for argument in arguments:
            known = self._groups.get(argument) if isinstance(argument, str) else None
            if known is not None:
                return known
            group = process_group_of(argument)
            if group is not None:
                found = group.group_desc or group.group_name, dist.get_world_size(group)
                if isinstance(argument, str):
                    self._groups[argument] = found
                return found
        return "default_pg", dist.get_world_size()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow ``UntypedStorage.resize_``, with which FSDP frees and allocates and which no mode sees."""
        self.memory.resized(storage, "resize_", self.modules.current)

    def take(self) -> tuple[dict[str, Any], tuple[Collective, ...], Counter[str], Counter[str]]:
        """Return memory by phase, collectives, launches and flops since the last call."""
        collectives = tuple(Collective(*key, count=count, bytes=size) for key, (count, size) in self._collectives.items())
        found = self.memory.finish(), collectives, self._launches, self._flops
        self._collectives.clear()
        self._launches, self._flops = Counter(), Counter()
        return found


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bytes_of_c10d(name: str, args: Sequence[Any], given: Sequence[Tensor], tensors: Sequence[Tensor]) -> int:
    """Return the larger of what a collective sends and receives. Both are among its arguments, alone or as lists."""
    if "all_to_all" in name:
        return _nbytes(given) // 2
    sizes = [tensor.nbytes for tensor in tensors]
    if "coalesced" in name or name.startswith(_OF_LISTS):
        sizes += [_nbytes(tensors_in(one)) for one in args if isinstance(one, (list, tuple))]
    return max(sizes, default=0)


def _shares_storage(result: Any, arguments: Any) -> bool:
    """Whether no tensor of ``result`` has a storage of its own."""
    known = {storage_key(one.untyped_storage()) for one in tensors_in(arguments)}
    return all(storage_key(one.untyped_storage()) in known for one in tensors_in(result))


def _item(result: Any, number: int) -> Any:
    return result[number] if isinstance(result, (list, tuple)) else result


def _with_equal_heads(args: Sequence[Any], raw: bool) -> Sequence[Any]:
    """Return the arguments of attention, with keys and values as shapes that have a head for each query head. Fewer heads
    need no fewer operations, and the formulas of torch 2.11 refuse them.

    Args:
        raw: whether the formula reads the shapes of tensors, as FlexAttention's does, instead of shapes.
    """
    found = list(args)
    heads = max((one.shape[1] for one in found if isinstance(one, Tensor) and one.dim() == 4), default=1)
    for number, one in enumerate(found):
        if isinstance(one, Tensor) and one.dim() == 4 and one.shape[1] != heads:
            shape = torch.Size((one.shape[0], heads, *one.shape[2:]))
            found[number] = SimpleNamespace(shape=shape) if raw else shape
    return found


def _varlen_flops(name: str, args: Sequence[Any]) -> int:
    """Return the operations of variable-length attention if all documents are as long as the longest, without a mask. By
    torch's formula, even empty documents would be."""
    query = next(one for one in args if isinstance(one, Tensor) and one.dim() == 3)
    longest = next(one for one in args if isinstance(one, int))
    return (10 if "backward" in name else 4) * query.numel() * longest


def _launches(name: str, args: Sequence[Any]) -> int:
    short = name.partition("::")[2].partition(".")[0]
    if short in _NO_KERNEL or name.startswith("prim::"):  # prim::device asks a tensor for its device
        return 0
    if "_foreach_" in short or "_fused_" in short:
        return -(-len(args[0]) // TENSORS_PER_LAUNCH)
    return 1


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; ``tensor`` itself if it is none."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
