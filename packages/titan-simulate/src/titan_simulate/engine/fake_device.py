"""A simulated CUDA device: tensors on it are fake, and tensors on the CPU stay real.

Host code (data, counts, meshes, trials of small models) therefore computes as always. Operators that have a tensor on the
device, or make one, only compute shapes. The exception are tensors that the host allocates for a module on the meta device
(``to_empty``), such as offloaded parameters: these are fake, because they may be larger than this machine.

Every operator passes through :class:`FakeDevice`, a dispatch mode, and takes the first of these ways that applies::

    left to others    tensors of a subclass, such as DTensor, call this mode again with what they consist of; what torch
                      computes in a fake mode of its own, to find shapes, or traces, such as the gradient of a function of
                      FlexAttention's scores, is no work of the job
    remembered        it ran before with arguments of these shapes (operator_cache.py)
    real              it has nothing to do with the device; of pinned memory only the fact is kept
    composed          a custom operator that is made of others: those come here in its place
    value             it reads a value of a tensor, which the device may not have computed yet: a plausible number
    sized by values   the result has a size that depends on values: computed, if they are known (known_values.py)
    shape             torch's FakeTensorMode finds the shape of the result

Where the host would wait for the device, ``waits`` hears of it; ``seen`` hears of every operator on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.weak import WeakIdKeyDictionary

from titan_core.api import UserError
from titan_core.toolkit.simulation import COMPOSED
from titan_simulate.engine import known_values
from titan_simulate.engine.host_waits import HostWaits, caller
from titan_simulate.engine.operator_cache import Found, OperatorCache
from titan_simulate.engine.tensors import shown, tensors_in
from titan_simulate.torch_private import (
    DEVICE_OF,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    device_of,
    fake_device,
    in_foreign_fake_mode,
    lists_from,
    only_lift_cpu_tensors,
)

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)

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
        only_lift_cpu_tensors(True)
        self._lists = lists_from(self._list)
        self._lists.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._lists.__exit__(None, None, None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if operator is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of(args[0])
        if any(kind is not FakeTensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a subclass that consists of other tensors
        if in_foreign_fake_mode() or get_proxy_mode() is not None:
            return operator(*args, **keywords)
        keyed = self._cache.key(operator, args, keywords)
        found = None if keyed is None else self._cache.found.get(keyed[0])
        if keyed is not None and found is not None:
            return self._remembered(found, operator, args, keywords, keyed[1])

        tensors, name = tensors_in((args, keywords)), operator.name()
        if operator is _aten.is_pinned.default:
            return self.is_pinned(args[0])
        if name == "aten::_pin_memory":
            return self._pin(args[0])
        if not self._is_fake(operator, tensors, keywords):
            return self._real(operator, args, keywords)
        if any(isinstance(tensor, FakeTensor) and tensor.fake_mode is not self.fake for tensor in tensors):
            return operator(*args, **keywords)
        if operator in COMPOSED:
            return self._composed(COMPOSED[operator], args, keywords)
        if _reads_value(operator):
            return self._value(args[0])
        sized = _is_sized_by_values(operator, args, keywords)
        if sized and any(tensor.is_cuda for tensor in tensors):
            what = "indexing by a mask" if operator is _aten.index.Tensor else name.removeprefix("aten::")
            self._waits.wait(f"{what} (its size depends on values on the device)")
        if sized and known_values.all_known(tensors):
            return self._sized_by_values(operator, args, keywords)
        if name in ("aten::_to_copy", "aten::copy_"):
            self._check_copy(name, args, keywords)
        result = self._shape(operator, name, args, keywords)
        found = None if keyed is None else self._cache.keep(*keyed, operator, keywords, result)
        known_values.follow(operator, args, keywords, tensors, result)
        self._seen(operator, args, keywords, result, found, self._composing)
        return result

    def _remembered(self, found: Found, operator: Any, args: Any, keywords: dict[str, Any], tensors: list[Tensor]) -> Any:
        result = found.result(tensors)
        if found.integers:
            known_values.follow(operator, args, keywords, tensors, result)
        self._seen(operator, args, keywords, result, found, self._composing)
        return result

    def _is_fake(self, operator: Any, tensors: list[Tensor], keywords: dict[str, Any]) -> bool:
        """Whether ``operator`` has a tensor on the device, or makes one."""
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

    def _composed(self, compute: Callable[..., Any], args: Any, keywords: dict[str, Any]) -> Any:
        """Run an operator that is made of others, and observe those."""
        before, self._composing = self._composing, True
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return compute(*args, **keywords)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._composing = before

    def _value(self, tensor: Tensor) -> Any:
        """Return a plausible number in place of the value of ``tensor``."""
        if tensor.is_cuda:
            self._waits.wait("reading a value of a tensor (item, bool, int, float)")
        known = known_values.values_of(tensor)
        if known is not None:
            return known.item()
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _list(self, tensor: Tensor) -> list[Any]:
        """Return plausible numbers in place of the values of ``tensor``, as ``Tensor.tolist`` does, which copies it once."""
        if tensor.is_cuda:
            self._waits.wait(f"reading the values of {shown(tensor)} (tolist)")
        known = known_values.values_of(tensor)
        found: list[Any] = (torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known).tolist()
        return found

    def _sized_by_values(self, operator: Any, args: Any, keywords: dict[str, Any]) -> Any:
        """Return a result whose size depends on values, which are known."""
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

    def _shape(self, operator: Any, name: str, args: Any, keywords: dict[str, Any]) -> Any:
        """Return a fake result of the right shape.

        Raises:
            UserError: the shape depends on values that are not known.
        """
        pinned = keywords.get("pin_memory")
        if name == "aten::_to_copy":
            # Copies to the host that do not wait for the device go into pinned memory.
            pinned = pinned or (keywords.get("non_blocking") and _type(keywords.get("device")) == "cpu" and args[0].is_cuda)
            if not isinstance(args[0], FakeTensor):
                # The fake mode would copy it for real, and then compute on the device with its known values.
                args = (self.fake.from_tensor(args[0]), *args[1:])
        try:
            with self.fake:
                result = operator(*args, **keywords)
        except DynamicOutputShapeException as error:
            why = (
                f"the size of the result of {name.removeprefix('aten::')} depends on values that a simulation does not know"
            )
            raise UserError.one(caller(), why, "compute the size from shapes, or simulate without this module") from error
        if pinned:
            for tensor in tensors_in(result):
                self._pinned[tensor.untyped_storage()] = True
        return result

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in pinned memory."""
        return tensor.untyped_storage() in self._pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            with self.fake:
                pinned = tensor.clone()
        else:
            pinned = tensor.clone()
        self._pinned[pinned.untyped_storage()] = True
        return pinned

    def _check_copy(self, name: str, args: Any, keywords: dict[str, Any]) -> None:
        """Report a copy between host and device that the host waits for."""
        if name == "aten::copy_":
            target, source = args[0], args[1]
            to, blocking = target.device.type, not (args[2] if len(args) > 2 else keywords.get("non_blocking", False))
            pageable = to == "cpu" and not self.is_pinned(target)
        else:
            source = args[0]
            to, blocking, pageable = _type(keywords.get("device") or source.device), not keywords.get("non_blocking"), False
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


def _type(device: Any) -> str | None:
    return None if device is None else torch.device(device).type


def _reads_value(operator: Any) -> bool:
    """Whether ``operator`` returns a number that is a value of its argument."""
    return torch.Tag.data_dependent_output in getattr(operator, "tags", ()) and operator is not _aten.equal.default


def _is_sized_by_values(operator: Any, args: Sequence[Any], keywords: dict[str, Any]) -> bool:
    """Whether the result of ``operator`` has a size, or is a comparison, that depends on values."""
    if operator is _aten.repeat_interleave.Tensor and keywords.get("output_size") is not None:
        return False
    if operator is _aten.index.Tensor:
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    return operator is _aten.equal.default or torch.Tag.dynamic_output_shape in getattr(operator, "tags", ())
