"""Checks of a model before it is cut into stages or its layers are sharded. The trial on the job's ranks
(:mod:`titan_core.model.mesh_trial`) finds the rest, but a stage that raises an error there leaves the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import (
    Around,
    Column,
    Experts,
    ModelLayout,
    ModelTrial,
    Problem,
    Row,
    Shard,
    TrainingContext,
    matches,
)
from titan_parallel.config import PipelineKeys, TensorParallelKeys
from titan_parallel.pipeline_plan import plan_pipeline
from titan_parallel.tensor_parallel_check import divides


def check_pipeline(model: nn.Module, trial: ModelTrial, context: TrainingContext[PipelineKeys]) -> Iterator[Problem]:
    """Report a model whose stages need more than hidden states, positions and documents."""
    place = trial.positions_fault()
    if place is not None:
        why = f"a pipeline passes positions to the model, and with positions 0 .. seq - 1 the output of {place} differs"
        yield trial.problem(why, "read positions from the argument positions, and make 0 .. seq - 1 its default")
        return
    mistake = _stages_mistake(trial, plan_pipeline(context.job).stages)
    if mistake is not None:
        why = f"cut into stages, the model's output differs{mistake}: {_broken_link(trial)}"
        fix = "move that computation into one of these modules, or set parallelism.pipeline_parallel_degree = 1"
        yield trial.problem(why, fix)


def _stages_mistake(trial: ModelTrial, stages: tuple[tuple[str, ...], ...]) -> str | None:
    """Run each stage on the hidden states that its first module receives in the undivided model, and compare its output with
    the next stage's input, or with the logits.

    Returns:
        ``None`` if all are equal; otherwise the error that a stage raised, in brackets, or an empty string.
    """
    inputs: dict[str, Tensor] = {}

    def keep(name: str, forward: Callable[..., Any], hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
        inputs.setdefault(name, hidden)
        return forward(hidden, *arguments, **keywords)

    first = [stage[0] for stage in stages]
    try:
        trial.run(trial.tokens, trial.positions, around={name: partial(keep, name) for name in first})
        # Overwrites whatever modules keep from a call: a stage does not see what earlier stages keep.
        trial.run(trial.tokens.roll(1), trial.positions)
        expected = trial.logits
        for stage in reversed(stages):
            pruned: dict[str, Around] = {name: _pruned for name in trial.units() if name not in stage}
            if not trial.same(trial.run(inputs[stage[0]], trial.positions, around=pruned), expected):
                return ""
            expected = inputs[stage[0]]
    except Exception as error:  # noqa: BLE001 - the undivided model works, so cutting it caused this
        return f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return None


def _pruned(forward: Callable[..., Any], hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    return hidden


def _broken_link(trial: ModelTrial) -> str:
    """Return where the hidden states that a module returns are not those that the next one receives."""
    returned: dict[str, Any] = {}
    last, found = "the model's input", ""

    def follow(name: str, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        nonlocal last, found
        first = arguments[0] if arguments else None
        expected = returned.get(last, trial.tokens)
        if not found and not (isinstance(first, Tensor) and first.shape == expected.shape and torch.equal(first, expected)):
            found = f"between {last!r} and {name!r}, the model's forward changes or replaces the hidden states"
        output = forward(*arguments, **keywords)
        last, returned[name] = name, output
        return output

    units = trial.units()
    logits = trial.run(trial.tokens, trial.positions, around={name: partial(follow, name) for name in units})
    if found:
        return found
    if not trial.same(returned[last], logits):
        return f"after {last!r}, the model's forward changes the logits"
    return (
        "every module of embedding, blocks and head must be called once, in that order, and depend only on its "
        "hidden states, positions and documents"
    )


def check_tensor(model: nn.Module, trial: ModelTrial, context: TrainingContext[TensorParallelKeys]) -> Iterator[Problem]:
    """Report layers that are sharded outside regions. Anything else that tensor parallelism cannot shard shows on the job's
    ranks (:mod:`titan_core.model.mesh_trial`)."""
    for mistake in (*_regions(model, trial.layout), *_ends(model, trial.layout)):
        yield trial.problem(*mistake)


def _regions(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, str]]:
    """Yield mistakes in the regions of sharded parameters: (why, fix)."""
    names = [name for name, _ in model.named_modules()]
    regions = [name for name in names if matches(name, layout.regions)]
    rules = {path: layout.rule(path) for path, _ in model.named_parameters(remove_duplicate=False)}
    divided = {path: rule for path, rule in rules.items() if divides(rule)}
    closing = [f"{name}." for name in names if matches(name, layout.sums)]
    closing += [path for path, rule in divided.items() if isinstance(rule, Row)]
    seen: set[str] = set()
    for path, rule in divided.items():
        if rule is not None and not any(path.startswith(f"{region}.") for region in regions):
            pattern = next(pattern for pattern in layout.rules if matches(path, [pattern]))
            if pattern not in seen:
                why = f"rules have {rule} for {path!r}, which is outside all regions, so its input would not be gathered"
                yield why, f"name a module that contains {path!r} in regions"
            seen.add(pattern)
    for region in regions:
        outer = next((other for other in regions if region.startswith(f"{other}.")), None)
        if outer is not None:
            yield f"regions names {region!r}, which is inside the region {outer!r}", "name only one of them"
        inside = [rule for path, rule in divided.items() if path.startswith(f"{region}.")]
        if not inside and not any(path.startswith(f"{region}.") for path in closing):
            continue  # a region that every rank computes whole
        if not any(isinstance(rule, Column | Shard | Experts) for rule in inside):
            why = f"regions names {region!r}, which has no parameter with the rule Column or Shard"
            yield why, "add rules for its sharded parameters, or remove the region"
        if not any(path.startswith(f"{region}.") for path in closing):
            why = f"regions names {region!r}, which has no layer with the rule Row and no module in sums"
            yield why, "name the module whose outputs are summed over ranks in rules or sums, or remove the region"


def _ends(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, str]]:
    """Yield mistakes in the last module: (why, fix)."""
    last = model.get_submodule(layout.head[-1])
    if not isinstance(last, nn.Linear) or last.out_features != layout.vocab_size:
        why = f"head ends with {layout.head[-1]!r}, and tensor parallelism needs an nn.Linear with vocab_size outputs there"
        yield why, "make the nn.Linear that computes the logits the last module of head"
