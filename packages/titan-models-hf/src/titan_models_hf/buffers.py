"""The buffers of a model, computed by the library's ``_init_weights``: rotary frequencies, scales of embeddings, others; or
by its constructors from plain numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.library import plain_model, refusal


def buffer(args: HFArgs, name: str) -> Tensor:
    """Return the buffer ``name`` on the CPU.

    Raises:
        UserError: the library does not compute it.
    """
    found = _buffers(args).get(name)
    if found is None:
        raise refusal(args, f"the library's _init_weights does not compute the buffer {name!r}")
    return found.clone()


def uncomputed(args: HFArgs) -> str | None:
    """Return the name of a buffer that the library does not compute; ``None`` if there is none."""
    return next((name for name in _computed(args, 0) if name not in _buffers(args)), None)


@lru_cache(maxsize=1)
def _buffers(args: HFArgs) -> dict[str, Tensor]:
    """Return the buffers that the library computes."""
    # One that is not computed keeps what it had before.
    first, second = (_computed(args, fill) for fill in (0, 1))
    found = {name: value for name, value in first.items() if torch.equal(value, second[name])}
    if len(found) < len(first):
        with _NumbersOnTheCpu():
            constructed = dict(plain_model(args).named_buffers())
        found |= {name: value for name, value in constructed.items() if name not in found and not value.is_meta}
    return found


class _NumbersOnTheCpu(TorchFunctionMode):
    """Makes tensors of plain numbers on the CPU, also while a model is built on the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        return function(*arguments, **{**(keywords or {}), **({"device": "cpu"} if function is torch.tensor else {})})


@lru_cache(maxsize=2)
def _computed(args: HFArgs, fill: int) -> dict[str, Tensor]:
    """Return all buffers after the model's initialization, whose parameters stay on the meta device.

    Args:
        fill: the value of their elements before.
    """
    model = plain_model(args)
    for owner in model.modules():
        kept = set(owner.state_dict())
        for name, before in list(owner.named_buffers(recurse=False)):
            owner.register_buffer(name, torch.full_like(before, fill, device="cpu"), persistent=name in kept)
    with torch.device("cpu"), torch.no_grad():
        library.initialize(model)
    return dict(model.named_buffers())
