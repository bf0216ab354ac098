"""A small model with weights in this process, for tests that compute with one."""

from __future__ import annotations

import torch
from torch import nn

from titan_core.api import ModelPart
from titan_core.model.materialise import materialise
from titan_core.model.next_token import NextToken
from titan_testing.tiny import define
from titan_testing.tiny_args import TinyArgs

CPU = torch.device("cpu")


def tiny(seed: int = 1, **sizes: int) -> ModelPart:
    """Return a small model, for tests that compute with one."""
    args = TinyArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, max_seq_len=1200)
    definition = define(args.model_copy(update=sizes))
    with torch.device("meta"):
        module = definition.build()
    assert isinstance(module, nn.Module)
    part = ModelPart(module, definition.layout, NextToken())
    materialise(part, CPU, seed)
    for block in part.blocks().values():  # weights of training's size attend to everything alike
        for parameter in block.parameters():
            parameter.data.mul_(20 if parameter.ndim == 2 else 1)
    return part
