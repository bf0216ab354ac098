"""Checks of a model's experts, made before they are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import Around, ModelTrial, Problem, TrainingContext, matches
from titan_experts.config import DEGREE, VIEW, ExpertParallelKeys, folded
from titan_experts.divide import expert_rules
from titan_experts.torch_private import substituted_parameters


def check_model(model: nn.Module, trial: ModelTrial, context: TrainingContext[ExpertParallelKeys]) -> Iterator[Problem]:
    """Require that experts have modules of their own, that the degree divides their number, and that they compute the same
    results when divided, with padding and with rows of no expert."""
    degree = context.job.mesh.degree(VIEW)
    lent, sizes = folded(context.job.mesh), dict[str, int]()
    dims: dict[str, dict[str, int]] = {}
    for path, module in model.named_modules():
        rules = expert_rules(module, path, trial.layout)
        if not rules:
            continue
        if set(rules) != {name for name, _ in module.named_parameters()}:
            why = f"only some parameters of {path!r} have the rule Experts, but a module's parameters are gathered together"
            yield trial.problem(why, "keep experts in a module of their own")
            return
        counts = {module.get_parameter(name).shape[rule.dim] for name, rule in rules.items()}
        if len(counts) > 1:
            why = f"the parameters of {path!r} hold different numbers of experts: {sorted(counts)}"
            yield trial.problem(why, "fix the dimension in their rules")
            return
        sizes[path], dims[path] = counts.pop(), {name: rule.dim for name, rule in rules.items()}
        if sizes[path] % degree:
            yield context.config.problem(DEGREE, f"must divide the {sizes[path]} experts of {path!r}")
            return
        if lent and _is_within(path, trial.layout.regions):
            why = f"its ranks include those of {lent[0]}, which hold the same positions in the region that {path!r} is in"
            yield context.config.problem(DEGREE, why, "set parallelism.disable_sequence_parallel = true, or it to 1")
            return
    calls = trial.calls_of(sizes)
    for call in calls:
        rows = call.arguments[0] if len(call.arguments) == 2 else None
        if not isinstance(rows, tuple) or len(rows) != 2 or call.arguments[1] != (sizes[call.name],) or call.output != rows:
            why = f"{call.name!r} holds experts, and is called with {call.arguments}"
            fix = "call it by position with (rows [rows, dim], sorted by expert; counts int64 [experts])"
            yield trial.problem(why, f"{fix}, and return a tensor of the shape of rows")
            return
    around: dict[str, Around] = {call.name: partial(_divided, degree, dims[call.name]) for call in calls}
    place = trial.fault(lambda: trial.run(trial.tokens, trial.positions, around=around))
    if place is not None:
        why = f"divided over {degree} ranks, {place} computes a different result"
        fix = "let each expert compute only its own rows, with its own index of each parameter, independently of other rows"
        fix += ", and ignore rows after the last counted one"
        yield trial.problem(why, fix)


def _is_within(path: str, regions: tuple[str, ...]) -> bool:
    return any(matches(outer, regions) for outer in accumulate(path.split("."), "{}.{}".format))


def _divided(degree: int, dims: Mapping[str, int], forward: Callable[..., Any], rows: Tensor, counts: Tensor) -> Tensor:
    """Return what the experts compute if each of ``degree`` ranks holds an equal share of them.

    Args:
        dims: parameter -> its dimension of experts.
        forward: the method of a module that holds all experts.
    """
    module: nn.Module = forward.__self__  # type: ignore[attr-defined]
    counts_by_rank = counts.view(degree, -1)
    rows_by_rank = rows.split(counts_by_rank.sum(1).tolist())
    outputs = []
    for rank, (rank_rows, rank_counts) in enumerate(zip(rows_by_rank, counts_by_rank, strict=True)):
        shares = {name: module.get_parameter(name).chunk(degree, dim)[rank] for name, dim in dims.items()}
        padded, places = _padded(rank_rows, rank_counts)
        with substituted_parameters(module, shares):
            outputs.append(forward(padded, rank_counts + 1)[places])
    return torch.cat(outputs)


def _padded(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rows`` with a row of zeros after those of each expert and rows of no expert at the end, which are not numbers
    so that any use of them shows; and where ``rows`` are in it."""
    zeros, unused = rows.new_zeros(1, rows.shape[1]), rows.new_full((2, rows.shape[1]), torch.nan)
    padded = [part for piece in rows.split(counts.tolist()) for part in (piece, zeros)]
    before = torch.arange(counts.shape[0], device=rows.device).repeat_interleave(counts)
    return torch.cat([*padded, unused]), torch.arange(rows.shape[0], device=rows.device) + before
