"""The buffers of a model, computed by the library's ``_init_weights``: rotary frequencies, scales of embeddings, others."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.library import plain_model, refusal


def buffer(args: HFArgs, name: str) -> Tensor:
    """Return the buffer ``name`` on the CPU.

    Raises:
        UserError: the library does not compute it.
    """
    # One that is not computed keeps what it had before.
    first, second = (_computed(args, fill)[name] for fill in (0, 1))
    if not torch.equal(first, second):
        raise refusal(args, f"the library's _init_weights does not compute the buffer {name!r}")
    return first.clone()


def uncomputed(args: HFArgs) -> str | None:
    """Return the name of a buffer that the library does not compute; ``None`` if there is none."""
    first, second = (_computed(args, fill) for fill in (0, 1))
    return next((name for name in first if not torch.equal(first[name], second[name])), None)


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
