"""Regions of tensor parallelism that gather their input again for backward instead of keeping it.

The layers of a region save its input, which has all positions, for the gradients of their weights. Instead, this rank's
positions are kept, and gathered when backward reaches the region, while its last layers compute their gradients (Korthikanti
et al., arXiv 2205.05198, section 4.2.2).

Autograd's hooks of saved tensors need nothing of the layers that read the input. torch calls only the innermost hooks, so
those around the region, of a checkpoint or of a block that is offloaded, are called from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from titan_parallel.activation_offload import BlockPass
from titan_parallel.region_collectives import Ranks, start_gather
from titan_parallel.torch_private import is_whole_view, saved_tensor_hooks


class Regather:
    """Replaces what a region's code saves of its gathered input, from :meth:`begin` to :meth:`end`."""

    def __init__(self, ranks: Ranks, always: bool) -> None:
        """
        Args:
            always: within a checkpoint as well, where recomputation has gathered the input before: a third gather in a step.
        """
        self._ranks = ranks
        self._always = always
        self._current: tuple[saved_tensors_hooks, _Input] | None = None

    def begin(self, share: Tensor, whole: Tensor) -> None:
        """Keep ``share`` in place of ``whole``, which has been gathered from it."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or hasattr(whole, "__tensor_flatten__"):
            return  # compiled code, which selects what it keeps; evaluation; a float8 tensor
        outer = saved_tensor_hooks()
        if outer is None or self._always or isinstance(outer[0], BlockPass):
            saved = _Input(self._ranks, share.detach(), whole, *(outer or (_unchanged, _unchanged)))
            hooks = saved_tensors_hooks(saved.pack, saved.unpack)
            hooks.__enter__()
            self._current = hooks, saved

    def end(self, *arguments: object) -> None:
        """Let the region's code save tensors as before; a forward hook of the region, called on errors too."""
        if self._current is not None:
            (hooks, saved), self._current = self._current, None
            saved.forget()
            hooks.__exit__()


class _Input:
    """The input of a region in one forward pass, and in its backward passes."""

    def __init__(
        self, ranks: Ranks, share: Tensor, whole: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self._ranks, self._pack, self._unpack = ranks, pack, unpack
        self._share: Tensor | None = share
        self._whole: Tensor | None = whole
        self._kept: Any = None  # the share, as the hooks outside have packed it
        self._saves = self._reads = 0
        self._gathering: Callable[[], Tensor] | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Return what to save for ``tensor``: of the input, only its shape."""
        if self._share is None or self._whole is None or not is_whole_view(tensor, self._whole):
            return self._pack(tensor)
        if not self._saves:
            self._kept = self._pack(self._share)
        self._saves += 1
        return tensor.shape

    def forget(self) -> None:
        """Release the input: the region's forward pass is over."""
        self._share = self._whole = None

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that was saved as ``packed``."""
        if not isinstance(packed, torch.Size):
            if self._saves and not self._reads:
                self._start()  # backward has reached the region, whose last layers read other tensors first
            return self._unpack(packed)
        self._start()
        if self._whole is None:
            assert self._gathering is not None
            self._whole = self._gathering()
        whole = self._whole.view(packed)
        self._reads += 1
        if self._reads % self._saves == 0:  # each layer has read it; a pipeline's schedule may differentiate a region twice
            self._gathering = self._whole = None
        return whole

    def _start(self) -> None:
        if self._gathering is None:
            self._gathering = start_gather(self._unpack(self._kept), self._ranks)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
