"""Results of operators on fake tensors, remembered by the shapes of their arguments.

A step repeats the same few hundred operators thousands of times. Finding the shape of a result runs Python code of torch for
hundreds of microseconds; making another result of a known shape takes ten. An operator is remembered only if its result is a
function of its arguments' shapes, types, devices and plain values. ``FakeTensorMode`` has a cache of its own, which does
less: without this one, a step of a rank of llama3_405b on 512 GPUs (28,217 operators) takes 27.7 s in place of 15.4, and the
step of llama3_8b that an estimate simulates (1,264 operators) 2.84 s in place of 2.80.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_simulate.engine.tensors import storage_key
from titan_simulate.torch_private import FakeTensor, FakeTensorMode, fake_device, is_composite

_aten = torch.ops.aten
_NEVER = frozenset({"aten::_pin_memory", "aten::is_pinned", "aten::set_.source_Storage", "aten::resize_"})
_COPIES = ("aten::_to_copy", "aten::copy_")
_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device, torch.Size}
)

_NOTHING, _SAME, _VIEW, _NEW = range(4)


class Found:
    """What is known of one operator with arguments of certain shapes."""

    __slots__ = ("_mode", "_sequence", "facts", "integers", "new", "outputs")

    def __init__(self, mode: FakeTensorMode, outputs: list[tuple[Any, ...]], sequence: type | None) -> None:
        self._mode, self.outputs = mode, outputs
        self._sequence = sequence
        self.new = tuple((number, *output[1:3]) for number, output in enumerate(outputs) if output[0] == _NEW)
        """Outputs with a storage of their own: number, bytes and shape."""
        self.integers = any(output[5] is not None and not output[5].is_floating_point for output in outputs)
        """Whether results have integer values, which may be known."""
        self.facts: Any = None
        """What an observer has derived from the operator and the shapes."""

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result for arguments that contain ``tensors``."""
        results: list[Any] = []
        for kind, where, shape, stride, offset, dtype, device in self.outputs:
            if kind == _NOTHING:
                results.append(None)
            elif kind == _SAME:
                results.append(tensors[where])
            elif kind == _NEW:
                new = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                results.append(FakeTensor(self._mode, new, device))
            else:
                empty = torch.empty_strided((), (), dtype=dtype, device="meta")
                empty.set_(tensors[where].untyped_storage(), offset, shape, stride)
                results.append(FakeTensor(self._mode, empty, device))
        return results[0] if self._sequence is None else self._sequence(results)


class OperatorCache:
    """Finds results of operators in ``mode``."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self.found: dict[tuple[Any, ...], Found] = {}

    def key(self, operator: Any, args: Sequence[Any], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
        """Return what determines the result, and the tensors among the arguments. ``None``: the result is never known.

        An operator without a fake tensor must make one on the device.
        """
        parts: list[Any] = [operator, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        tensors: list[Any] = []
        if not self._add(args, parts, tensors):
            return None
        if keywords:
            parts.extend(keywords)
            if not self._add(keywords.values(), parts, tensors):
                return None
        if tensors or ((device := keywords.get("device")) is not None and torch.device(device).type == "cuda"):
            return tuple(parts), tensors
        return None

    def _add(self, arguments: Any, parts: list[Any], tensors: list[Any]) -> bool:
        for argument in arguments:
            kind = type(argument)
            if kind is FakeTensor:
                if argument.fake_mode is not self._mode or argument.constant is not None:
                    return False
                parts += (
                    argument.shape, argument.stride(), argument.storage_offset(), argument.dtype, fake_device(argument),
                )  # fmt: skip
                tensors.append(argument)
            elif kind in _PLAIN:
                parts += (kind, argument)  # 1, 1.0 and True are equal
            elif kind is list or kind is tuple:
                parts += (kind, len(argument))
                if not self._add(argument, parts, tensors):
                    return False
            else:
                return False
        return True

    def keep(
        self, key: tuple[Any, ...], tensors: Sequence[Tensor], operator: Any, keywords: dict[str, Any], result: Any
    ) -> Found | None:
        """Remember ``result``, unless shapes do not determine it."""
        name, tags = operator.name(), getattr(operator, "tags", None)
        if tags is None or name in _NEVER or not _TAGS.isdisjoint(tags):  # operators of higher order have no tags
            return None
        if keywords.get("pin_memory") or is_composite(operator):
            return None
        devices = {fake_device(tensor).type for tensor in tensors}
        to = keywords.get("device")
        if name in _COPIES and (len(devices) > 1 or (to is not None and torch.device(to).type != "cuda")):
            return None  # each copy between host and device is checked
        if operator is _aten.index.Tensor and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:]):
            return None
        owners: dict[int, int] = {}
        for number, tensor in enumerate(tensors):
            owners.setdefault(storage_key(tensor.untyped_storage()), number)
        outputs: list[tuple[Any, ...]] = []
        for output in result if isinstance(result, (list, tuple)) else (result,):
            described = self._describe(output, tensors, owners)
            if described is None:
                return None
            outputs.append(described)
        found = Found(self._mode, outputs, type(result) if isinstance(result, (list, tuple)) else None)
        if any(output[0] == _VIEW for output in outputs) and len(owners) < len(tensors):
            return None  # which argument it is a view of is ambiguous
        self.found[key] = found
        return found

    def _describe(self, output: Any, tensors: Sequence[Tensor], owners: dict[int, int]) -> tuple[Any, ...] | None:
        if output is None:
            return (_NOTHING, *[None] * 6)
        if type(output) is not FakeTensor or output.constant is not None or output.requires_grad or output.is_sparse:
            return None
        for number, tensor in enumerate(tensors):
            if output is tensor:
                return (_SAME, number, None, None, None, tensor.dtype, None)
        storage = output.untyped_storage()
        shape, stride, offset, dtype = tuple(output.shape), output.stride(), output.storage_offset(), output.dtype
        device = fake_device(output)
        owner = owners.get(storage_key(storage))
        if owner is not None:
            return _VIEW, owner, shape, stride, offset, dtype, device
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if offset or output.is_conj() or output.is_neg() or like.untyped_storage().nbytes() != storage.nbytes():
            return None
        return _NEW, storage.nbytes(), shape, stride, offset, dtype, device
