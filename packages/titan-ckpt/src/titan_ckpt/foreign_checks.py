"""Whether weights that others have written are those of a model, all of them and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from titan_ckpt.dtypes import FLOATS, converts_exactly
from titan_ckpt.foreign_files import DOWNLOAD_AGAIN, ForeignFiles, our_rows
from titan_core.api.errors import UserError
from titan_core.api.tools.patterns import matches
from titan_core.api.tools.plain_json import read_object
from titan_core.api.weights import ForeignTensor, WeightFormat

CONFIG_OF = {"hf": "config.json", "meta": "params.json"}
_QUANTISED = ("quantization_config", "compression_config", "quantization")
_BLOCK = 1 << 24
"""Elements that are compared at a time."""


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """The config file beside the weights.

    Raises:
        UserError: it is not there, damaged, or says that the weights are codes of a quantised format.
    """
    path = folder / CONFIG_OF[kind]
    config = read_object(path, DOWNLOAD_AGAIN)
    for key in _QUANTISED:
        if config.get(key):
            method = config[key].get("quant_method", "") if isinstance(config[key], dict) else config[key]
            why = f"{key} says that these weights are quantised ({method}): their numbers are codes, not weights"
            raise UserError.one(str(path), why, "take the model in bfloat16 or float32, or dequantise it first")
    return config


def read_args(form: WeightFormat, config: Mapping[str, Any]) -> BaseModel:
    """The arguments of the model that ``config`` describes.

    Raises:
        ValueError: why there are none.
    """
    try:
        return form.to_args.load()(config)
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"a value has another type or size than it should: {error}") from error


def declared_tensors(form: WeightFormat, args: BaseModel, model: str) -> Sequence[ForeignTensor]:
    """The tensors that the plugin lists for a model: no name and no parameter twice.

    Raises:
        UserError: the plugin has it wrong.
    """
    tensors = form.tensors.load()(args)
    names: set[str] = set()
    parameters: set[str] = set()
    for one in tensors:
        repeated = (
            one.name if one.name in names else "" if one.copy else one.parameter if one.parameter in parameters else ""
        )
        if repeated:
            where = f"model {model!r}, format {form.name!r}"
            raise UserError.one(where, f"its plugin lists {repeated} twice: one would replace the other", "fix the plugin")
        names.add(one.name)
        parameters |= set() if one.copy else {one.parameter}
    return tensors


def require_weights(
    files: ForeignFiles,
    declared: Sequence[ForeignTensor],
    wanted: Mapping[str, tuple[tuple[int, ...], str | None]],
    ignored: Collection[str],
    where: str,
) -> None:
    """Every parameter that is wanted must be there, in its shape and in a type whose values are weights; and nothing may be
    there that belongs to no parameter.

    Args:
        wanted: the shape of each parameter that is to be loaded, and the type that must hold all of its values (``None``:
            any of :data:`~titan_ckpt.dtypes.FLOATS`).

    Raises:
        UserError: naming the first few that are not so.
    """
    there = files.names()
    problems = []
    for tensor in declared:
        if tensor.copy or tensor.parameter not in wanted:
            continue
        shape, dtype = wanted[tensor.parameter]
        if tensor.name not in there:
            problems.append(f"{tensor.name} is not there")
        elif files.shape(tensor) != shape:
            problems.append(f"{tensor.name} is {list(files.shape(tensor))} there, and the model wants {list(shape)}")
        elif (stored := files.dtype(tensor.name)) not in FLOATS:
            problems.append(f"{tensor.name} is stored as {stored}, which no weight is (codes of a quantised format?)")
        elif dtype is not None and not converts_exactly(stored, dtype):
            problems.append(f"{tensor.name} is {stored} there, and {dtype} does not hold all its values")
    known = {tensor.name for tensor in declared}
    unclaimed = sorted(name for name in there if name not in known and not matches(name, ignored))
    problems += [f"{name} belongs to nothing in the model" for name in unclaimed]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError.one(where, "; ".join(problems[:3]) + more, "are these the weights of this model?")


def require_equal_copies(files: ForeignFiles, declared: Sequence[ForeignTensor], where: str) -> None:
    """A tensor that is there under two names must be the same under both.

    Raises:
        UserError: naming one that is not.
    """
    there = files.names()
    own = {tensor.parameter: tensor for tensor in declared if not tensor.copy}
    for copy in (tensor for tensor in declared if tensor.copy and tensor.name in there):
        original = own[copy.parameter]
        shape = files.shape(original)
        same = files.shape(copy) == shape and files.dtype(copy.name) == files.dtype(original.name)
        step = max(1, _BLOCK // max(1, torch.Size(shape[1:]).numel()))
        for start in range(0, shape[0] if same else 0, step):
            rows = (our_rows(files, one, start, min(start + step, shape[0])) for one in (copy, original))
            same = same and torch.equal(*rows)
        if not same:
            why = f"{copy.name} differs from {original.name}, and the model shares one weight for both"
            raise UserError.one(
                where, why, "set tie_embeddings (tie_word_embeddings in config.json) to what the weights are"
            )
