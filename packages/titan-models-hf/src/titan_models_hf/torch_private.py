"""Every use of what torch does not promise to keep. Checked with torch 2.11 to 2.15."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def whole_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that ``tensor`` is a view of; ``None`` if it is none."""
    return tensor._base


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor``, or a view of its memory, has been written to."""
    return tensor._version


def run_last(module: nn.Module, hook: int) -> None:
    """Let the forward hook with this number run after all others of ``module``."""
    if hook in module._forward_hooks:
        module._forward_hooks[hook] = module._forward_hooks.pop(hook)
