"""Selective recomputation for schedules that go backward through a block twice, once for the gradients of its inputs and
once for those of its weights: what is kept must serve both times. torch's own ``create_selective_checkpoint_contexts`` gives
each kept value away once (torch 2.11 to 2.15)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from titan_parallel.torch_private import TorchDispatchMode, detach_with_version, tree_map_only, version_of

Operator = Any
Keep = Callable[[Operator, int], bool]
"""(operator, how many of its group ran before it in this call) -> whether its result is kept."""


class _Counting(TorchDispatchMode):
    """Counts the operators of a call by their groups."""

    def __init__(self, group_of: Callable[[Operator], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group_of = group_of
        self._seen: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> _Counting:
        self._seen.clear()  # the same object serves each recomputation
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def place_of(self, operator: Operator) -> tuple[Any, int] | None:
        """The group and number of this operator; ``None`` where it is none that could be kept."""
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
        place = self.place_of(operator)
        if place is not None and self._keep(operator, place[1]):
            # Whole, with what is no tensor: attention on a GPU gives numbers too.
            self._kept[place] = tree_map_only(Tensor, _Kept, result)
        return result


class _Using(_Counting):
    def __init__(self, group_of: Callable[[Operator], Any], kept: dict[Any, Any]) -> None:
        super().__init__(group_of)
        self._kept = kept

    def __torch_dispatch__(self, operator: Operator, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        place = self.place_of(operator)
        if place is None or place not in self._kept:
            return operator(*arguments, **(keywords or {}))
        return tree_map_only(_Kept, lambda kept: kept.tensor_of(operator), self._kept[place])


class _Kept:
    """A tensor, as it was."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = detach_with_version(tensor)
        self._version = version_of(self._tensor)

    def tensor_of(self, operator: Operator) -> Tensor:
        """The tensor, each time as another one that autograd knows nothing of yet."""
        if version_of(self._tensor) != self._version:
            raise RuntimeError(f"the result of {operator} was changed in place, and recomputation had kept it")
        return self._tensor.detach()


def contexts(group_of: Callable[[Operator], Any], keep: Keep) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For :func:`torch.utils.checkpoint.checkpoint`: what to be in forward, and in each recomputation of that call.

    Args:
        group_of: operator -> the group that it is counted in, ``None`` where it is never kept.
    """
    kept: dict[Any, Any] = {}
    return _Keeping(group_of, keep, kept), _Using(group_of, kept)
