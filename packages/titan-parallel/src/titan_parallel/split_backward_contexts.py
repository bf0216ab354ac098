"""Selective recomputation for schedules that run backward through a block twice: for the gradients of its inputs, then for
those of its weights. Saved tensors must serve both passes, and torch's own ``create_selective_checkpoint_contexts`` releases
each at its first use (torch 2.11 to 2.15).

Also for blocks with experts: torch's contexts refuse a recomputation that calls other operators than forward did, as where
FSDP gathers experts on their own, and saved results that the model changes in place. These contexts look only at the
operators whose results are saved, and compute a changed one again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from titan_parallel.torch_private import TorchDispatchMode, detach_with_version, version_of

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
        self._tensor = detach_with_version(tensor)
        self._version = version_of(self._tensor)

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed since."""
        return version_of(self._tensor) != self._version

    def detached(self) -> Tensor:
        """Return the tensor, newly detached so that autograd can record each use separately."""
        return self._tensor.detach()


def contexts(new_decision: Callable[[], Decision]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of forward and of recomputation, as ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`.

    Args:
        new_decision: returns the decisions for one pass, forward or recomputation.
    """
    kept: dict[Any, Any] = {}
    return _Keeping(new_decision, kept), _Using(new_decision, kept)
