"""Follows which module computes, in forward, in recomputation and in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import module_tracker

_tracker = module_tracker.ModuleTracker()


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return bool(_tracker.is_bw)


class ModuleTracker:
    """Names the module that computes now.

    In the backward pass, that is the module for whose output a gradient was last computed.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._head: set[str] = set()
        self._stack: list[tuple[str, bool]] = []  # name, and whether a backward pass has called it
        self._backward = ""
        self._named: Callable[[], Tensor | None] = lambda: None  # the last output that belongs to a module

    def know(self, names: Iterable[tuple[str, nn.Module]], head: str) -> None:
        """Add the modules of a part of the model; ``head`` is its last module, which computes logits and loss."""
        for name, module in names:
            self._names[id(module)] = name
        self._head.add(head)

    @property
    def current(self) -> str:
        """Name of the innermost module that computes, ``""`` if none does."""
        if self._stack:
            return self._stack[-1][0]
        return self._backward if in_backward() else ""

    @property
    def recomputes(self) -> bool:
        """Whether a module computes forward because a backward pass has called it. A head that computes gradients of its
        logits in its own forward pass does not."""
        return bool(self._stack) and self._stack[-1][1]

    def is_head(self, name: str) -> bool:
        """Whether ``name`` is the model's last module."""
        return name in self._head

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the calls of all modules within the ``with`` block."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._stack.append((name, in_backward()))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is None or all(name != one for one, _ in self._stack):
            return
        while self._stack.pop()[0] != name:  # modules within that raised
            pass
        outputs = output if isinstance(output, (list, tuple)) else (output,)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                if tensor is self._named():
                    continue  # the output of a module within, which this one returns as it is
                self._named = weakref.ref(tensor)
                tensor.register_hook(partial(self._enter_backward, name))

    def _enter_backward(self, name: str, gradient: Tensor) -> None:
        self._backward = name
