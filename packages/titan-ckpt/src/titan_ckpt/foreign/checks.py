"""Checking that foreign weights are exactly the weights of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from pydantic import BaseModel

from titan_ckpt.foreign.files import ForeignFiles, our_rows
from titan_ckpt.format.dtypes import FLOATS, converts_exactly
from titan_core.api import ForeignTensor, UserError, WeightFormat, matches

_BLOCK = 1 << 24
"""Number of elements to compare at a time."""


def declared_tensors(form: WeightFormat, args: BaseModel, model: str) -> Sequence[ForeignTensor]:
    """Return the foreign tensors that the plugin declares for a model, after checking that there are no duplicates.

    Raises:
        UserError: the plugin declares a name or a parameter twice.
    """
    tensors = form.tensors.load()(args)
    names: set[str] = set()
    parameters: set[str] = set()
    for tensor in tensors:
        repeated = next((name for name in (tensor.name, *tensor.aliases) if name in names), "")
        if not repeated and not tensor.copy and tensor.parameter in parameters:
            repeated = tensor.parameter
        if repeated:
            where = f"model {model!r}, format {form.name!r}"
            raise UserError.one(where, f"the plugin declares {repeated} twice, so that one would be lost", "fix the plugin")
        names |= {tensor.name, *tensor.aliases}
        parameters |= set() if tensor.copy else {tensor.parameter}
    return tensors


def as_named_in(files: ForeignFiles, declared: Sequence[ForeignTensor], where: str) -> Sequence[ForeignTensor]:
    """Return the declared tensors under the names that they have in ``files``.

    Raises:
        UserError: a tensor is there under two names.
    """
    present, found = files.names(), []
    for tensor in declared:
        names = [name for name in (tensor.name, *tensor.aliases) if name in present]
        if len(names) > 1:
            raise UserError.one(where, f"contains both {names[0]} and {names[1]}, two names of one tensor")
        found.append(replace(tensor, name=names[0]) if names else tensor)
    return found


def require_weights(
    files: ForeignFiles,
    declared: Sequence[ForeignTensor],
    wanted: Mapping[str, tuple[tuple[int, ...], str | None]],
    ignored: Collection[str],
    where: str,
) -> None:
    """Require each requested parameter to be in the files, with the right shape and an unquantised dtype, and each tensor in
    the files to belong to a parameter.

    Args:
        wanted: shape of each parameter to load, and the dtype to convert to without loss (``None``: any conversion from
            :data:`~titan_ckpt.format.dtypes.FLOATS` is allowed).
        ignored: patterns of tensors in the files that are not weights.

    Raises:
        UserError: tensors are missing, unknown or different. The message names the first few.
    """
    present = files.names()
    problems = []
    for tensor in declared:
        if tensor.copy or tensor.parameter not in wanted:
            continue
        shape, dtype = wanted[tensor.parameter]
        if tensor.name not in present:
            problems.append(f"{tensor.name} is missing")
        elif files.shape(tensor) != shape:
            problems.append(f"{tensor.name} has shape {list(files.shape(tensor))}, but the model requires {list(shape)}")
        elif (stored := files.dtype(tensor.name)) not in (*FLOATS, dtype):
            problems.append(f"{tensor.name} is stored as {stored}, which is not a dtype of weights (are they quantised?)")
        elif dtype is not None and not converts_exactly(stored, dtype):
            problems.append(f"{tensor.name} is {stored}, which does not convert to {dtype} without loss")
    known = {tensor.name for tensor in declared}
    unclaimed = sorted(name for name in present if name not in known and not matches(name, ignored))
    problems += [f"{name} does not belong to the model" for name in unclaimed]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError.one(where, "; ".join(problems[:3]) + more, "are these the weights of this model?")


def require_equal_copies(files: ForeignFiles, declared: Sequence[ForeignTensor], where: str) -> None:
    """Require tensors that are stored under two names to be equal.

    Raises:
        UserError: two copies differ. The message names both.
    """
    present = files.names()
    originals = {tensor.parameter: tensor for tensor in declared if not tensor.copy}
    for copy in (tensor for tensor in declared if tensor.copy and tensor.name in present):
        original = originals[copy.parameter]
        shape = files.shape(original)
        same = files.shape(copy) == shape and files.dtype(copy.name) == files.dtype(original.name)
        step = max(1, _BLOCK // max(1, torch.Size(shape[1:]).numel()))
        for start in range(0, shape[0] if same else 0, step):
            rows = (our_rows(files, tensor, start, min(start + step, shape[0])) for tensor in (copy, original))
            same = same and torch.equal(*rows)
        if not same:
            why = f"{copy.name} differs from {original.name}, but the model uses one weight for both"
            raise UserError.one(where, why, "set tie_embeddings (tie_word_embeddings in config.json) to match the weights")
