"""What a model's experts must be to be divided."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api.build_context import TrainingContext
from titan_core.api.errors import Problem
from titan_core.api.layout import ModelLayout
from titan_core.api.layout_rules import Experts
from titan_core.api.model_trial import Around, ModelTrial
from titan_expert_parallel.config import ExpertParallelKeys


def experts_in(module: nn.Module, path: str, layout: ModelLayout) -> dict[str, Experts]:
    """Of the parameters that ``module``, called ``path``, owns itself, those that hold experts."""
    rules = {name: layout.rule(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
    return {name: rule for name, rule in rules.items() if isinstance(rule, Experts)}


def check_model(model: nn.Module, trial: ModelTrial, context: TrainingContext[ExpertParallelKeys]) -> Iterator[Problem]:
    """Experts must stand in modules of their own, be as many as can be divided, and each compute its own rows."""
    degree, sizes = context.facts.mesh.degree("ep"), {}
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
            yield trial.problem(
                f"the parameters of {path!r} hold different numbers of experts: {sorted(counts)}", "fix rules"
            )
            return
        sizes[path] = counts.pop()
        if sizes[path] % degree:
            key = "parallelism.expert_parallel_degree"
            yield context.config.problem(key, f"must divide the {sizes[path]} experts of {path!r}")
            return
    calls = trial.calls_of(sizes)
    for call in calls:
        rows = call.arguments[0] if len(call.arguments) == 2 else None
        if not isinstance(rows, tuple) or len(rows) != 2 or call.arguments[1] != (sizes[call.name],) or call.output != rows:
            why = f"{call.name!r} holds experts, and is called with {call.arguments}"
            fix = (
                "call it with (rows [rows, dim], those of the first expert first; counts int64 [experts]), by position, and "
            )
            yield trial.problem(why, fix + "let it return the like of rows")
            return
    around: dict[str, Around] = {call.name: partial(_one_by_one, sizes[call.name]) for call in calls}
    place = trial.fault(lambda: trial.run(trial.tokens, trial.positions, around=around))
    if place is not None:
        why = f"{place} computes something else where each expert computes its rows by itself"
        yield trial.problem(why, "call it with rows in the order of their experts, and let rows not depend on each other")


def _one_by_one(size: int, forward: Callable[..., Any], rows: Tensor, counts: Tensor) -> Tensor:
    """What the experts return where each is called without the rows of the others."""
    alone = torch.diag(counts)
    pieces = rows.split(counts.tolist())
    return torch.cat([forward(piece, alone[number]) for number, piece in zip(range(size), pieces, strict=True)])
