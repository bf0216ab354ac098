"""What a model's experts must be to be divided."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api.build_context import TrainingContext
from titan_core.api.errors import Problem
from titan_core.api.model_trial import Around, ModelTrial
from titan_expert_parallel.config import ExpertParallelKeys
from titan_expert_parallel.own_experts import experts_in, holding


def check_model(model: nn.Module, trial: ModelTrial, context: TrainingContext[ExpertParallelKeys]) -> Iterator[Problem]:
    """Experts must stand in modules of their own, be as many as can be divided, and compute the same once divided."""
    degree = context.facts.mesh.degree("ep")
    sizes: dict[str, int] = {}
    dims: dict[str, dict[str, int]] = {}
    for path, module in model.named_modules():
        found = experts_in(module, path, trial.layout)
        if not found:
            continue
        if set(found) != {name for name, _ in module.named_parameters()}:
            why = f"only some parameters of {path!r} have the rule Experts, and those of a module are gathered together"
            yield trial.problem(why, "keep experts in a module of their own")
            return
        counts = {module.get_parameter(name).shape[rule.dim] for name, rule in found.items()}
        if len(counts) > 1:
            why = f"the parameters of {path!r} hold different numbers of experts: {sorted(counts)}"
            yield trial.problem(why, "fix the dimension in their rules")
            return
        sizes[path], dims[path] = counts.pop(), {name: rule.dim for name, rule in found.items()}
        if sizes[path] % degree:
            key = "parallelism.expert_parallel_degree"
            yield context.config.problem(key, f"must divide the {sizes[path]} experts of {path!r}")
            return
    calls = trial.calls_of(sizes)
    for call in calls:
        rows = call.arguments[0] if len(call.arguments) == 2 else None
        if not isinstance(rows, tuple) or len(rows) != 2 or call.arguments[1] != (sizes[call.name],) or call.output != rows:
            why = f"{call.name!r} holds experts, and is called with {call.arguments}"
            fix = "call it with (rows [rows, dim], those of the first expert first; counts int64 [experts]), by position"
            yield trial.problem(why, f"{fix}, and let it return the like of rows")
            return
    around: dict[str, Around] = {call.name: partial(_divided, degree, dims[call.name]) for call in calls}
    place = trial.fault(lambda: trial.run(trial.tokens, trial.positions, around=around))
    if place is not None:
        why = f"divided over {degree} ranks, {place} computes something else"
        fix = "let each expert compute its own rows with its own index of each parameter, whatever the other rows are"
        yield trial.problem(why, fix)


def _divided(degree: int, dims: Mapping[str, int], forward: Callable[..., Any], rows: Tensor, counts: Tensor) -> Tensor:
    """What the experts return where each of ``degree`` ranks holds some of them.

    Args:
        dims: parameter -> the dimension that its experts are along.
        forward: the method of a module that holds all experts.
    """
    module: nn.Module = forward.__self__  # type: ignore[attr-defined]
    per_rank = counts.view(degree, -1)
    computed = []
    for rank, (piece, own) in enumerate(zip(rows.split(per_rank.sum(1).tolist()), per_rank, strict=True)):
        with holding(module, {name: module.get_parameter(name).chunk(degree, dim)[rank] for name, dim in dims.items()}):
            computed.append(forward(piece, own))
    return torch.cat(computed)
