"""What a model must do to be divided in each way: found by doing to a small copy of it, in one process, what the division
is going to do (:mod:`titan_core.model.trial`), before anything is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api.batch import Batch
from titan_core.api.build_context import TrainingContext
from titan_core.api.errors import Problem
from titan_core.api.layout import ModelLayout
from titan_core.api.layout_rules import Column, Experts, Row, Rule, Shard
from titan_core.api.model_trial import Around, ModelTrial, Shares
from titan_core.api.tools.patterns import matches
from titan_parallel.config import ContextParallelKeys, PipelineKeys, TensorParallelKeys
from titan_parallel.context_parallel import HeadAndTail
from titan_parallel.pipeline_plan import plan_pipeline
from titan_parallel.region_trial import region_faults

_RANKS = 2
"""How many ranks a trial divides positions over."""


def check_pipeline(model: nn.Module, trial: ModelTrial, context: TrainingContext[PipelineKeys]) -> Iterator[Problem]:
    """Each stage must do its part of the work, given hidden states and positions alone."""
    place = trial.positions_fault()
    if place is not None:
        yield _ignores_positions(trial, place, "a pipeline")
        return
    mistake = _stages_mistake(trial, plan_pipeline(context.facts).stages)
    if mistake is not None:
        why = f"cut into stages, the model computes something else{mistake}: {_broken_link(trial)}"
        fix = "move what happens there into one of these modules, or set parallelism.pipeline_parallel_degree = 1"
        yield trial.problem(why, fix)


def _stages_mistake(trial: ModelTrial, stages: tuple[tuple[str, ...], ...]) -> str | None:
    """``None`` where each stage, given the hidden states that its first module gets in the whole model, gives those that the
    next stage's first module gets, or the logits; otherwise the error that it raised, if any, in brackets."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str, forward: Callable[..., Any], hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
        inputs.setdefault(name, hidden)
        return forward(hidden, *arguments, **keywords)

    first = [stage[0] for stage in stages]
    try:
        trial.run(trial.tokens, trial.positions, around={name: partial(keep, name) for name in first})
        # What modules have kept of a call is then of another one, as a stage has none of what earlier stages keep.
        trial.run(trial.tokens.roll(1), trial.positions)
        expected = trial.logits
        for stage in reversed(stages):
            absent: dict[str, Around] = {name: _absent for name in trial.units() if name not in stage}
            if not trial.same(trial.run(inputs[stage[0]], trial.positions, around=absent), expected):
                return ""
            expected = inputs[stage[0]]
    except Exception as error:  # noqa: BLE001 - the model works whole, so this is what cutting it does
        return f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return None


def _absent(forward: Callable[..., Any], hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    return hidden


def _broken_link(trial: ModelTrial) -> str:
    """Where the hidden states that a module returns are not what the next one is called with."""
    returned: dict[str, Any] = {}
    last, found = "the model's input", ""

    def follow(name: str, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        nonlocal last, found
        first = arguments[0] if arguments else None
        expected = returned.get(last, trial.tokens)
        if not found and not (isinstance(first, Tensor) and first.shape == expected.shape and torch.equal(first, expected)):
            found = f"between {last!r} and {name!r}, the model's forward changes the hidden states, or hands on others"
        output = forward(*arguments, **keywords)
        last, returned[name] = name, output
        return output

    units = trial.units()
    logits = trial.run(trial.tokens, trial.positions, around={name: partial(follow, name) for name in units})
    if found:
        return found
    if not trial.same(returned[last], logits):
        return f"behind {last!r}, the model's forward changes the logits"
    return (
        "every module of embedding, blocks and head must be called once, in that order, and depend on nothing but "
        "the hidden states that it is called with, positions and documents"
    )


def check_tensor(model: nn.Module, trial: ModelTrial, context: TrainingContext[TensorParallelKeys]) -> Iterator[Problem]:
    """Layers must be divided within regions, and between these each position must be treated by itself."""
    layout, keys = trial.layout, context.section
    mistakes = [trial.problem(*mistake) for mistake in _regions(model, layout)]
    mistakes += [trial.problem(*mistake) for mistake in _ends(model, layout)]
    if mistakes:
        yield from mistakes
        return
    place = trial.positions_fault()
    if place is not None:
        yield _ignores_positions(trial, place, "tensor parallelism")
        return
    if keys.disable_sequence_parallel:
        shares = Shares((torch.arange(trial.seq),))
    else:
        shares = Shares(tuple(torch.arange(trial.seq).chunk(_RANKS)))
    place = trial.fault(partial(_divided_between_regions, trial, shares), shares)
    if place is not None:
        what = "does not take hidden states as its first argument"
        if not keys.disable_sequence_parallel:
            what = f"{what}, or depends on other positions, of which sequence parallelism gives each rank some"
        why = f"outside of regions, {place} {what}"
        fix = "name in regions the module that does, call modules of embedding and head one after another"
        if not keys.disable_sequence_parallel:
            fix += ", or set parallelism.disable_sequence_parallel = true"
        yield trial.problem(why, fix)
    for name, fault in region_faults(trial, context.facts.mesh.degree("tp")).items():
        why = (
            f"region {name!r}, divided over {context.facts.mesh.degree('tp')} ranks by its rules, does not compute the same"
        )
        fix = "fix the rules of its parameters: a rank has consecutive features of each (not of several side by side)"
        yield trial.problem(f"{why}: {fault}", f"{fix}, and compute with the sizes of tensors, not with those of the model")
    if not keys.disable_loss_parallel:
        yield from _logits_are_those_of_the_head(trial)


def _regions(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, str]]:
    """How divided parameters lie in regions: (why, fix)."""
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
                why = f"rules have {rule} for {path!r}, which is in no module of regions, so that its input is not gathered"
                yield why, f"name in regions the module that {path!r} is a part of"
            seen.add(pattern)
    for region in regions:
        outer = next((other for other in regions if region.startswith(f"{other}.")), None)
        if outer is not None:
            yield f"regions names {region!r}, which is a part of the region {outer!r}", "name only one of them"
        inside = [rule for path, rule in divided.items() if path.startswith(f"{region}.")]
        if not any(isinstance(rule, Column | Shard | Experts) for rule in inside):
            why = f"regions names {region!r}, in which no parameter has the rule Column or Shard"
            yield why, "say in rules which of its parameters are divided, or drop it"
        if not any(one.startswith(f"{region}.") for one in closing):
            why = f"regions names {region!r}, in which no layer has the rule Row, and which names no module of sums"
            yield why, "say in rules or sums where what ranks compute is summed, or drop it"


def divides(rule: Rule | None) -> bool:
    """Whether tensor parallelism divides a parameter of this rule."""
    if isinstance(rule, Experts):
        return divides(rule.within)
    return isinstance(rule, Column | Row | Shard)


def _ends(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, str]]:
    """What the first module and the last one must be: (why, fix)."""
    last = model.get_submodule(layout.head[-1])
    if not isinstance(last, nn.Linear) or last.out_features != layout.vocab_size:
        why = (
            f"head ends with {layout.head[-1]!r}, and tensor parallelism divides an nn.Linear with vocab_size outputs there"
        )
        yield why, "let the nn.Linear that gives the logits be the last module of head"


def _divided_between_regions(trial: ModelTrial, shares: Shares) -> Any:
    """Logits where each rank has its share of the positions but within regions."""
    layout = trial.layout

    def split(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Tensor:
        return shares.split(forward(*arguments, **keywords))

    def whole(forward: Callable[..., Any], first: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return shares.split(forward(shares.join(first), *arguments, **keywords))

    def gathered(forward: Callable[..., Any], first: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return forward(shares.join(first), *arguments, **keywords)

    around: dict[str, Around] = {call.name: whole for call in trial.calls if matches(call.name, layout.regions)}
    around |= {layout.embedding[0]: split, layout.head[-1]: gathered}
    return trial.run(trial.tokens, trial.positions, around=around)


def _logits_are_those_of_the_head(trial: ModelTrial) -> Iterator[Problem]:
    logits: list[Any] = []

    def keep(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        logits.append(forward(*arguments, **keywords))
        return logits[-1]

    returned = trial.run(trial.tokens, around={trial.layout.head[-1]: keep})
    if not trial.same(returned, logits[-1]):
        why = f"the model's forward changes the logits that {trial.layout.head[-1]!r} returns, of which each rank has a part"
        yield trial.problem(why, "set parallelism.disable_loss_parallel = true, or return them as they are")


def check_context(model: nn.Module, trial: ModelTrial, context: TrainingContext[ContextParallelKeys]) -> Iterator[Problem]:
    """Positions must mix in mixers alone, which see the whole sequence; all else has a rank's share of it."""
    length = trial.seq // (2 * _RANKS) * 2 * _RANKS
    if length != trial.seq:
        why = f"the model takes at most {trial.seq} tokens"
        yield trial.problem(why, "set parallelism.context_parallel_degree = 1")
        return
    place = trial.positions_fault()
    if place is not None:
        yield _ignores_positions(trial, place, "context parallelism")
        return
    order = torch.arange(trial.seq)[None]
    batches = [HeadAndTail(rank, _RANKS)(Batch(order, order)) for rank in range(_RANKS)]
    shares = Shares(tuple(batch.tokens[0] for batch in batches))

    def whole(dim: int, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Tensor:
        joined = (shares.join(one, dim) if _is_share(one, dim) else one for one in arguments)
        return shares.split(forward(*joined, **keywords), dim)

    def _is_share(one: Any, dim: int) -> bool:
        return isinstance(one, Tensor) and one.dim() > dim and one.shape[dim] * _RANKS == trial.seq

    mixers = {call.name: trial.layout.mixer(call.name) for call in trial.calls}
    around: dict[str, Around] = {
        name: partial(whole, mixer.sequence_dim) for name, mixer in mixers.items() if mixer is not None
    }

    def divided() -> Any:
        logits = trial.run(shares.split(trial.tokens), shares.split(trial.positions), around=around)
        return shares.join(logits)

    place = trial.fault(divided, shares)
    if place is not None:
        why = f"{place} depends on other positions and is not in mixers, or ignores the positions that it receives"
        fix = "set parallelism.context_parallel_degree = 1, or keep what mixes positions in mixers"
        yield trial.problem(why, fix)


def _ignores_positions(trial: ModelTrial, place: str, division: str) -> Problem:
    why = f"{division} gives the model its positions, and {place} computes something else where 0 .. seq - 1 are given"
    return trial.problem(why, "take positions from the argument positions, and let its default be 0 .. seq - 1")
