"""The buffers of a model, computed by the library's ``_init_weights``: rotary frequencies, scales of embeddings, others."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.library import plain_model, refusal


def buffer(args: HFArgs, name: str) -> Tensor:
    """Return the buffer ``name`` on the CPU.

    Raises:
        UserError: the library does not compute it.
    """
    owner, _, leaf = name.rpartition(".")
    model = _model(args)
    first, second = (_computed(model, model.get_submodule(owner), leaf, fill) for fill in (0, 1))
    if not torch.equal(first, second):
        raise refusal(args, f"the library's _init_weights does not compute the buffer {name!r}")
    return first


@lru_cache(maxsize=1)
def _model(args: HFArgs) -> Any:
    return plain_model(args)


def _computed(model: Any, owner: nn.Module, leaf: str, fill: int) -> Tensor:
    """Return a buffer after the initialization of its module, whose parameters stay on the meta device.

    Args:
        fill: its value before. One that is not computed keeps it.
    """
    module = copy.deepcopy(owner)
    for name, before in list(module.named_buffers(recurse=False)):
        module.register_buffer(name, torch.full_like(before, fill, device="cpu"), persistent=name in module.state_dict())
    with torch.device("cpu"), torch.no_grad():
        library.init_weights(model, module)
    return dict(module.named_buffers(recurse=False))[leaf]
