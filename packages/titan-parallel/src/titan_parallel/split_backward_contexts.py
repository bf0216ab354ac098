"""Selective recomputation for schedules that run backward through a block twice: for the gradients of its inputs, then for
those of its weights. Saved tensors must serve both passes, and torch's own ``create_selective_checkpoint_contexts`` releases
each at its first use (torch 2.11 to 2.15)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from titan_parallel.torch_private import TorchDispatchMode, detach_with_version, tree_map_only, version_of

Operator = Any
Keep = Callable[[Operator, int], bool]
"""(operator, number of operators of its group that ran before it in this call) -> whether to keep its result."""


class _Counting(TorchDispatchMode):
    """Counts the operators of a call by group."""

    def __init__(self, group_of: Callable[[Operator], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group_of = group_of
        self._seen: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> _Counting:
        self._seen.clear()  # every recomputation enters the same object
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def count(self, operator: Operator) -> tuple[Any, int] | None:
        """Count ``operator``, and return its group and its number within the group; ``None`` if it is never kept."""
        group = self._group_of(operator)
        if group is None:
            return None
        self._seen[group] += 1
        return group, self._seen[group] - 1


class _Keeping(_Counting):
    def __init__(self, group_of: Callable[[Operator], Any], keep: Keep, kept: dict[Any, Any]) -> None:
        super().__init__(group_of)
        self._keep, self._kept = keep, kept

    def __torch_dispatch__(self, operator: Operator, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        key = self.count(operator)
        if key is not None and self._keep(operator, key[1]):
            # Results may contain more than tensors: attention kernels on GPUs return numbers too.
            self._kept[key] = tree_map_only(Tensor, _Kept, result)
        return result


class _Using(_Counting):
    def __init__(self, group_of: Callable[[Operator], Any], kept: dict[Any, Any]) -> None:
        super().__init__(group_of)
        self._kept = kept

    def __torch_dispatch__(self, operator: Operator, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        key = self.count(operator)
        if key is None or key not in self._kept:
            return operator(*arguments, **(keywords or {}))
        return tree_map_only(_Kept, lambda kept: kept.tensor_of(operator), self._kept[key])


class _Kept:
    """A saved tensor that detects in-place changes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = detach_with_version(tensor)
        self._version = version_of(self._tensor)

    def tensor_of(self, operator: Operator) -> Tensor:
        """Return the tensor, newly detached so that autograd can record each use separately."""
        if version_of(self._tensor) != self._version:
            raise RuntimeError(f"the result of {operator} was saved for backward, then changed in place")
        return self._tensor.detach()


def contexts(group_of: Callable[[Operator], Any], keep: Keep) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of forward and of recomputation, as ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`.

    Args:
        group_of: operator -> the group to count it in; ``None`` if its result is never kept.
        keep: whether to keep a result.
    """
    kept: dict[Any, Any] = {}
    return _Keeping(group_of, keep, kept), _Using(group_of, kept)
