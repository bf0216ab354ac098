"""How the library arranges a model's parameters in files, found by sending row numbers through its own conversion.

The library stacks experts and joins projections in memory, and writes them one by one. Each parameter is replaced by a
tensor of the same leading dimensions whose elements are the numbers of its rows; the numbers in the tensors that the library
would write say which rows they consist of.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from titan_core.api import ForeignTensor
from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.fused import Rows
from titan_models_hf.library import plain_model, refusal
from titan_models_hf.rearranged import rearranged_model


def foreign_tensors(args: HFArgs) -> list[ForeignTensor]:
    """Return the tensors of the library's files for the model of ``args``.

    Raises:
        UserError: the library rearranges more than the order of whole rows.
    """
    model = plain_model(args)
    tied = library.tied(model)
    persistent = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}
    buffers = {name for name, _ in model.named_buffers()}
    numbers, owners, start = {}, [], 0
    for name, tensor in persistent.items():
        leading = tensor.shape[:-1] if tensor.dim() > 1 else tensor.shape
        rows = math.prod(leading)
        numbers[name] = torch.arange(start, start + rows).view((*leading, *([1] if tensor.dim() > 1 else [])))
        owners.append((start, rows, name))
        start += rows
    pieces: dict[str, list[tuple[int, str, Tensor, bool]]] = {}
    bounds = torch.tensor([first for first, _, _ in owners])
    for name, found in library.stored(model, numbers).items():
        transposed = found.dim() > 1 and found.shape[-1] != 1
        rows = found.flatten()
        number = int(torch.searchsorted(bounds, rows[:1], right=True)) - 1
        first, count, parameter = owners[number]
        if not (first <= int(rows.min()) and int(rows.max()) < first + count):
            raise refusal(args, f"its files join several parameters in {name!r}, which Titan cannot divide")
        pieces.setdefault(parameter, []).append((int(rows[0]) - first, name, rows - first, transposed))
    _, joined = rearranged_model(args)
    parts: dict[str, list[tuple[str, Rows]]] = {}
    for name, rows in joined.items():
        parts.setdefault(rows.parameter, []).append((name, rows))
    declared = [_tensor(args, name, pieces.get(name, []), persistent[name], name in buffers) for name in persistent]
    return [
        *(tensor for whole in declared for tensor in _of_parts(args, whole, parts.get(whole.parameter, []))),
        *(ForeignTensor(name, source, copy=True) for name, source in tied.items()),
    ]


def _of_parts(args: HFArgs, whole: ForeignTensor, parts: list[tuple[str, Rows]]) -> list[ForeignTensor]:
    """Return the declaration of each parameter that consists of rows of ``whole``; of ``whole`` itself if none does."""
    if not parts:
        return [whole]
    if whole.pieces:
        raise refusal(args, f"its files store {whole.parameter!r} in pieces, and Titan divides it into others")
    total = sum(rows.size for _, rows in parts)
    return [
        replace(whole, parameter=name, rows=range(rows.first, rows.first + rows.size), row_block=total)
        for name, rows in parts
    ]


def _tensor(
    args: HFArgs, parameter: str, pieces: list[tuple[int, str, Tensor, bool]], like: Any, buffer: bool
) -> ForeignTensor:
    """Return the declaration of one parameter, of the rows in ``pieces``."""
    pieces = sorted(pieces, key=lambda piece: piece[0])
    rows = torch.cat([rows for _, _, rows, _ in pieces]) if pieces else torch.empty(0)
    expected = math.prod(like.shape[:-1]) if like.dim() > 1 else math.prod(like.shape)
    transposed = {transposed for *_, transposed in pieces}
    if not torch.equal(rows, torch.arange(expected)) or len(transposed) != 1:
        raise refusal(args, f"its files store {parameter!r} in an arrangement that Titan does not know")
    name = pieces[0][1]
    if len(pieces) == 1:
        return ForeignTensor(name, parameter, transpose=transposed.pop(), buffer=buffer)
    named = tuple((one, len(found)) for _, one, found, _ in pieces)
    return ForeignTensor(
        f"{parameter} ({len(pieces)} pieces)", parameter, pieces=named, transpose=transposed.pop(), buffer=buffer
    )
