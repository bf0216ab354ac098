"""A simulated CUDA device: tensors on it are fake, and tensors on the CPU stay real.

Host code (data, counts, meshes, trials of small models) therefore computes as always. Operators that have a tensor on the
device, or make one, only compute shapes. The exception are tensors that the host allocates for a module on the meta device
(``to_empty``), such as offloaded parameters: these are fake, because they may be larger than this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from titan_core.api import UserError
from titan_core.toolkit.simulation import COMPOSED
from titan_simulate.engine import known_values
from titan_simulate.engine.host_waits import HostWaits, caller
from titan_simulate.engine.operator_cache import Found, OperatorCache
from titan_simulate.torch_private import (
    DEVICE_OF,
    NUMBERS,
    PIN_MEMORY,
    SIZES_FROM_VALUES,
    TO_COPY,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    device_of,
    fake_device,
    in_foreign_fake_mode,
    is_wrapper,
    only_lift_cpu_tensors,
)

_aten = torch.ops.aten

Seen = Callable[[Any, Sequence[Any], dict[str, Any], Any, Found | None, bool], None]
"""Receives each operator on the device: (operator, arguments, keywords, result, what is known of it, whether it is a part of
a custom operator)."""


class FakeDevice(DispatchMode):
    """Active while a rank is simulated, in all threads that autograd starts."""

    supports_higher_order_operators = True

    def __init__(self, waits: HostWaits, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._waits, self._seen = waits, seen
        self._cache = OperatorCache(self.fake)
        self._composing = False
        self._pinned = WeakIdKeyDictionary()  # storages in pinned memory, which is not real

    def __enter__(self) -> FakeDevice:
        self._before = only_lift_cpu_tensors(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if operator is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of(args[0])
        # Subclasses such as DTensor run first, and call this mode with the operators that they consist of.
        if any(kind is not FakeTensor and is_wrapper(kind) for kind in types):
            return NotImplemented
        if in_foreign_fake_mode():
            return operator(*args, **keywords)
        keyed = self._cache.key(operator, args, keywords)
        if keyed is not None:
            key, tensors = keyed
            found = self._cache.found.get(key)
            if found is not None:
                result = found.result(tensors)
                if found.integers:
                    known_values.follow(operator, args, keywords, tensors, result)
                self._seen(operator, args, keywords, result, found, self._composing)
                return result
        tensors = tensors_in((args, keywords))
        if operator is _aten.is_pinned.default:
            return self.is_pinned(args[0])
        if operator is PIN_MEMORY:
            return self._pin(args[0])
        if not self._is_fake(operator, tensors, keywords):
            return self._real(operator, args, keywords)
        if any(isinstance(tensor, FakeTensor) and tensor.fake_mode is not self.fake for tensor in tensors):
            return operator(*args, **keywords)
        if operator in COMPOSED:
            return self._composed(COMPOSED[operator], args, keywords)
        if operator in NUMBERS:
            return self._number(args[0])
        if operator in SIZES_FROM_VALUES and known_values.all_known(tensors):
            return self._sized_by_values(operator, args, keywords)
        self._check_copy(operator, args, keywords, tensors)
        if operator in SIZES_FROM_VALUES and any(tensor.is_cuda for tensor in tensors):
            self._waits.wait(f"{operator.name().removeprefix('aten::')} (its size depends on values on the device)")
        elif operator is _aten.index.Tensor and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self._waits.wait("indexing by a mask (its size depends on values on the device)")
        pinned = keywords.get("pin_memory")
        if operator is TO_COPY and not isinstance(args[0], FakeTensor):
            # The fake mode would copy it for real, and then compute on the device with its known values.
            args = (self.fake.from_tensor(args[0]), *args[1:])
        try:
            with self.fake:
                result = operator(*args, **keywords)
        except DynamicOutputShapeException as error:
            name = operator.name().removeprefix("aten::")
            why = f"the size of the result of {name} depends on values that a simulation does not know"
            raise UserError.one(caller(), why, "compute the size from shapes, or simulate without this module") from error
        if pinned or self._is_async_copy_to_host(operator, tensors, keywords):
            for tensor in tensors_in(result):
                self._pinned[tensor.untyped_storage()] = True
        found = None if keyed is None else self._cache.keep(*keyed, operator, keywords, result)
        known_values.follow(operator, args, keywords, tensors, result)
        self._seen(operator, args, keywords, result, found, self._composing)
        return result

    def _composed(self, compute: Callable[..., Any], args: Any, keywords: dict[str, Any]) -> Any:
        """Run an operator that is made of others, and observe those."""
        before, self._composing = self._composing, True
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return compute(*args, **keywords)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._composing = before

    def _sized_by_values(self, operator: Any, args: Any, keywords: dict[str, Any]) -> Any:
        """Return a result whose size depends on values, which are known."""
        self._waits.wait(f"{operator.name().removeprefix('aten::')} (its size depends on values on the device)")
        values = known_values.compute(operator, args, keywords)
        if not isinstance(values, (Tensor, tuple)):
            return values
        device = fake_device(tensors_in((args, keywords))[0])
        with self.fake:
            made = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in tensors_in(values)]
        result = made[0] if isinstance(values, Tensor) else tuple(made)
        known_values.attach(result, values)
        self._seen(operator, args, keywords, result, None, self._composing)
        return result

    def _is_fake(self, operator: Any, tensors: list[Tensor], keywords: dict[str, Any]) -> bool:
        device = keywords.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return True
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return True
        if device is not None and torch.device(device).type == "cpu" and operator is _aten.empty_like.default:
            return tensors[0].is_meta
        # A real tensor on the device came from code that this mode did not see.
        return any(tensor.is_cuda for tensor in tensors)

    def _real(self, operator: Any, args: Any, keywords: dict[str, Any]) -> Any:
        if keywords.get("pin_memory"):
            result = operator(*args, **{**keywords, "pin_memory": False})
            self._pinned[result.untyped_storage()] = True
            return result
        return operator(*args, **keywords)

    def _pin(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            with self.fake:
                pinned = tensor.clone()
        else:
            pinned = tensor.clone()
        self._pinned[pinned.untyped_storage()] = True
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in pinned memory."""
        return tensor.untyped_storage() in self._pinned

    def _number(self, tensor: Tensor) -> Any:
        """Return a plausible number in place of the value of ``tensor``."""
        if tensor.is_cuda:
            self._waits.wait("reading a value of a tensor (item, bool, int, float)")
        known = known_values.values_of(tensor)
        if known is not None:
            return known.item()
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _is_async_copy_to_host(self, operator: Any, tensors: list[Tensor], keywords: dict[str, Any]) -> bool:
        # torch copies into pinned memory then.
        to = keywords.get("device")
        return bool(
            operator is TO_COPY
            and keywords.get("non_blocking")
            and to is not None
            and torch.device(to).type == "cpu"
            and tensors[0].is_cuda
        )

    def _check_copy(self, operator: Any, args: Any, keywords: dict[str, Any], tensors: list[Tensor]) -> None:
        """Report a copy between host and device that the host waits for."""
        if operator not in (TO_COPY, _aten.copy_.default):
            return
        if operator is _aten.copy_.default:
            target, source = args[0], args[1]
            to, blocking = target.device.type, not (args[2] if len(args) > 2 else keywords.get("non_blocking", False))
            pageable = to == "cpu" and not self.is_pinned(target)
        else:
            source = args[0]
            to = torch.device(keywords.get("device") or source.device).type
            blocking, pageable = not keywords.get("non_blocking"), False
        if source.device.type == to:
            return
        if to == "cuda":
            if blocking:
                self._waits.wait(f"a blocking copy of {shown(source)} to the device")
            elif not self.is_pinned(source) and source.dim():
                self._waits.wait(f"a copy of {shown(source)} from pageable memory to the device")
        elif to == "cpu" and source.is_cuda:
            if blocking:
                self._waits.wait(f"a blocking copy of {shown(source)} to the host")
            elif pageable:
                self._waits.wait(f"a copy of {shown(source)} to pageable memory")


def shown(tensor: Tensor) -> str:
    """Return shape and type of ``tensor`` for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _add_tensors(value, found)
    return found


def _add_tensors(value: Any, found: list[Tensor]) -> None:
    """Add the tensors in ``value`` to ``found``. Not an inner function: one that calls itself is a cycle, which would keep
    all that it sees alive."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add_tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _add_tensors(item, found)
