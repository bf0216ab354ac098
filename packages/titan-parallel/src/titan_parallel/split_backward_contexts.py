"""Selective recomputation for schedules that run backward through a block twice: for the gradients of its inputs, then for
those of its weights. Saved tensors must serve both passes, and torch's own ``create_selective_checkpoint_contexts`` releases
each at its first use (torch 2.11 to 2.15).

Also for blocks with experts: torch's contexts refuse a recomputation that calls other operators than forward did, as where
FSDP gathers experts on their own, and saved results that the model changes in place. These contexts look only at the
operators whose results are saved, and compute a changed one again. Hooks of saved tensors around the block, such as those
that offload it, receive the results too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from titan_parallel.torch_private import TorchDispatchMode, detach_with_version, saved_tensor_hooks, version_of

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
Decision = Callable[[Any], tuple[Any, bool]]
"""Operator -> a key of this call of it, the same in forward and in recomputation, and whether to keep its result."""


def _mapped(kind: type, change: Callable[[Any], Any], result: Any) -> Any:
    """Return the result of an operator, a value or a sequence of them, with ``change`` applied to those of ``kind``."""
    if isinstance(result, tuple | list):
        return type(result)(_mapped(kind, change, one) for one in result)
    return change(result) if isinstance(result, kind) else result


class _Counting(TorchDispatchMode):
    """Counts the operators of a call."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, new_decision: Callable[[], Decision], kept: dict[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._new_decision, self._decide = new_decision, new_decision()
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions, FlexAttention among them, run compiled."""
        return True

    def __enter__(self) -> _Counting:
        self._decide = self._new_decision()  # every recomputation enters the same object
        super().__enter__()  # type: ignore[no-untyped-call]
        return self


class _Keeping(_Counting):
    def __init__(self, new_decision: Callable[[], Decision], kept: dict[Any, Any], hooks: Hooks | None) -> None:
        super().__init__(new_decision, kept)
        self._hooks = hooks

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            for results in self._kept.values():
                _mapped(_Kept, lambda one: one.pack(*hooks), results)

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        if operator in SAC_IGNORED_OPS:
            return result
        key, keep = self._decide(operator)
        if keep:
            # Results may contain more than tensors: attention kernels on GPUs return numbers too.
            self._kept[key] = _mapped(Tensor, _Kept, result)
        return result


class _Using(_Counting):
    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        key = None if operator in SAC_IGNORED_OPS else self._decide(operator)[0]
        if key not in self._kept or _any_changed(self._kept[key]):
            return operator(*arguments, **(keywords or {}))
        return _mapped(_Kept, _Kept.detached, self._kept[key])


def _any_changed(kept: Any) -> bool:
    """Whether the model has changed a saved result in place, as some routers of transformers do with that of ``topk``. It is
    computed again then."""
    if isinstance(kept, tuple | list):
        return any(map(_any_changed, kept))
    return isinstance(kept, _Kept) and kept.is_changed


class _Kept:
    """A saved tensor that notices changes in place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = detach_with_version(tensor)
        self._version = version_of(self._tensor)
        self._read: Callable[[], Tensor] | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed since. Who has packed it looks for later changes."""
        return self._tensor is not None and version_of(self._tensor) != self._version

    def pack(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Keep what ``pack`` returns for the tensor instead."""
        if self._tensor is not None and not self.is_changed:
            packed, self._tensor = pack(self._tensor), None
            self._read = lambda: unpack(packed)

    def detached(self) -> Tensor:
        """Return the tensor, newly detached so that autograd can record each use separately."""
        tensor = self._tensor if self._read is None else self._read()
        assert tensor is not None
        return tensor.detach()


def contexts(new_decision: Callable[[], Decision]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of forward and of recomputation, as ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`.

    Args:
        new_decision: returns the decisions for one pass, forward or recomputation.
    """
    kept: dict[Any, Any] = {}
    return _Keeping(new_decision, kept, saved_tensor_hooks()), _Using(new_decision, kept)
