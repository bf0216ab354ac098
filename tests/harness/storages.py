"""Measures the memory that operators allocate, by the live storages of their results."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestLive(TorchDispatchMode):
    """Records the peak size, in bytes, of live tensors that were created inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live and storage._cdata not in inputs:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.largest = max(self.largest, sum(self._live.values()))
        return result
