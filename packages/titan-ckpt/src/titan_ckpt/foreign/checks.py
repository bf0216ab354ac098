"""Checking that foreign weights are exactly the weights of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from pydantic import BaseModel

from titan_ckpt.foreign.arrangement import by_name, read, shape_in, their_shapes
from titan_ckpt.foreign.files import ForeignFiles
from titan_ckpt.format.dtypes import FLOATS, converts_exactly
from titan_core.api import ForeignTensor, UserError, WeightFormat, matches

_BLOCK = 1 << 24
"""Number of elements to compare at a time."""


def declared_tensors(form: WeightFormat, args: BaseModel, model: str) -> Sequence[ForeignTensor]:
    """Return the foreign tensors that the plugin declares for a model, after checking that each of their rows belongs to
    exactly one parameter.

    Raises:
        UserError: the plugin declares a name, a row or a parameter twice, or only some rows of a tensor.
    """
    tensors = form.tensors.call_list(ForeignTensor, args)
    where, fix = f"{form.tensors.origin or f'model {model!r}'}, format {form.files!r}", "fix its WeightFormat"
    # Parameters that share a tensor share its aliases.
    names = Counter(alias for _, alias in {(tensor.name, alias) for tensor in tensors for alias in tensor.aliases})
    parameters = Counter(tensor.parameter for tensor in tensors if not tensor.copy)
    for name, sources in by_name(tensors).items():
        claimed = [row for tensor in sources for row in tensor.rows]
        alike = {(tensor.block, tensor.transpose, tensor.split) for tensor in sources}
        shared = claimed and len(alike) == 1 and len(set(claimed)) == len(claimed)
        names[name] += 1 if shared else len(sources)
        if shared and len(claimed) < (block := sources[0].block):
            why = f"the plugin declares {len(claimed)} of each {block} rows of {name}, so that the others would be lost"
            raise UserError.one(where, why, fix)
    if repeated := [name for counter in (names, parameters) for name, number in counter.items() if number > 1]:
        raise UserError.one(where, f"the plugin declares {repeated[0]} twice, so that one would be lost", fix)
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
    declared_by: str = "its WeightFormat",
) -> None:
    """Require each requested parameter to be in the files, with the right shape and an unquantised dtype, and each tensor in
    the files to belong to a parameter.

    Args:
        wanted: shape of each parameter to load, and the dtype to convert to without loss (``None``: any conversion from
            :data:`~titan_ckpt.format.dtypes.FLOATS` is allowed).
        ignored: patterns of tensors in the files that are not weights.
        declared_by: the plugin and its format, for errors that its author must fix.

    Raises:
        UserError: tensors are missing, unknown or different. The message names the first few.
    """
    present = files.names()
    problems = []
    for tensor in declared:
        if tensor.copy or tensor.parameter not in wanted:
            continue
        shape, dtype = wanted[tensor.parameter]
        for name, expected in their_shapes(tensor, shape).items():
            if name not in present:
                problems.append(f"{name} is missing")
            elif (found := files.shape(name, tensor.split)) != expected:
                problems.append(f"{name} has shape {list(found)}, but the model requires {list(expected)}")
            elif (stored := files.dtype(name)) not in (*FLOATS, dtype):
                problems.append(f"{name} is stored as {stored}, which is not a dtype of weights (are they quantised?)")
            elif dtype is not None and not converts_exactly(stored, dtype):
                problems.append(f"{name} is {stored}, which does not convert to {dtype} without loss")
    known = {name for tensor in declared for name in tensor.names}
    unclaimed = sorted(name for name in present if name not in known and not matches(name, ignored))
    problems += [f"{name} does not belong to the model" for name in unclaimed]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError.one(
            where, "; ".join(problems[:3]) + more, f"are these the weights of this model? If so, fix {declared_by}"
        )


def require_equal_copies(files: ForeignFiles, declared: Sequence[ForeignTensor], where: str) -> None:
    """Require tensors that are stored under two names to be equal.

    Raises:
        UserError: two copies differ. The message names both.
    """
    present = files.names()
    originals = {tensor.parameter: tensor for tensor in declared if not tensor.copy}
    for copy in (tensor for tensor in declared if tensor.copy and present.issuperset(tensor.names)):
        original = originals[copy.parameter]
        shape = shape_in(files, original)
        same = shape_in(files, copy) == shape and files.dtype(copy.names[0]) == files.dtype(original.names[0])
        step, rows = max(1, _BLOCK // max(1, torch.Size(shape[1:]).numel())), shape[0] if shape else 1
        for start in range(0, rows if same else 0, step):
            offsets, lengths = (start, *(0 for _ in shape[1:])), (min(step, rows - start), *shape[1:])
            same = same and torch.equal(*(read(files, tensor, shape, offsets, lengths) for tensor in (copy, original)))
        if not same:
            why = f"{copy.name} differs from {original.name}, but the model uses one weight for both"
            raise UserError.one(where, why, "set tie_embeddings (tie_word_embeddings in config.json) to match the weights")
