"""Checks that a model can be divided, by imitating each division on a small copy of it in one process
(:mod:`titan_core.model.trial`) before the model itself is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import (
    Around,
    Batch,
    Column,
    Experts,
    ModelLayout,
    ModelTrial,
    Problem,
    Row,
    Shard,
    Shares,
    TrainingContext,
    matches,
)
from titan_parallel.config import ContextParallelKeys, PipelineKeys, TensorParallelKeys
from titan_parallel.context_parallel import HeadAndTail
from titan_parallel.pipeline_plan import plan_pipeline
from titan_parallel.tensor_parallel_check import divides

_RANKS = 2
"""Number of ranks that a trial divides positions over."""


def check_pipeline(model: nn.Module, trial: ModelTrial, context: TrainingContext[PipelineKeys]) -> Iterator[Problem]:
    """Report a model whose stages need more than hidden states, positions and documents."""
    place = trial.positions_fault()
    if place is not None:
        yield _ignores_positions(trial, place, "a pipeline")
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
    """Report layers that are sharded outside regions, and modules outside regions that mix positions. Rules that do not fit
    what a region computes show on the job's ranks (:mod:`titan_core.model.mesh_trial`)."""
    layout, keys = trial.layout, context.section
    mistakes = [trial.problem(*mistake) for mistake in _regions(model, layout)]
    mistakes += [trial.problem(*mistake) for mistake in _ends(model, layout)]
    mistakes += [trial.problem(*mistake) for mistake in _whole_inputs(trial)]
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
            what = f"{what}, or depends on other positions, which sequence parallelism may place on other ranks"
        why = f"outside regions, {place} {what}"
        fix = "name that module in regions, or call the modules of embedding and head one after another"
        if not keys.disable_sequence_parallel:
            fix += ", or set parallelism.disable_sequence_parallel = true"
        yield trial.problem(why, fix)
    if not keys.disable_loss_parallel:
        yield from _require_unchanged_logits(trial)


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


def _whole_inputs(trial: ModelTrial) -> Iterator[tuple[str, str]]:
    """Yield layers with the rule Row that are called with what their region receives, which is not sharded: (why, fix)."""
    layout, received, mistakes = trial.layout, list[Any](), dict[str, str]()

    def enter(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        received[:] = [one for one in (*arguments, *keywords.values()) if isinstance(one, Tensor)]
        return forward(*arguments, **keywords)

    def take(name: str, forward: Callable[..., Any], hidden: Any, *arguments: Any, **keywords: Any) -> Any:
        if any(hidden is one for one in received):
            mistakes[name] = next(region for region in regions if name.startswith(f"{region}."))
        return forward(hidden, *arguments, **keywords)

    names = {call.name for call in trial.calls}
    regions = {name for name in names if matches(name, layout.regions)}
    inside = {name for name in names if any(name.startswith(f"{region}.") for region in regions)}
    rows = {name for name in inside if isinstance(layout.rule(f"{name}.weight"), Row)}
    around: dict[str, Around] = dict.fromkeys(regions, enter)
    trial.run(trial.tokens, around=around | {name: partial(take, name) for name in rows})
    for name, region in mistakes.items():
        why = f"rules have Row() for '{name}.weight', but its layer takes the whole input of region {region!r}"
        yield why, "give it Column(), and Row() to the layer that takes its results"


def _ends(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, str]]:
    """Yield mistakes in the last module: (why, fix)."""
    last = model.get_submodule(layout.head[-1])
    if not isinstance(last, nn.Linear) or last.out_features != layout.vocab_size:
        why = f"head ends with {layout.head[-1]!r}, and tensor parallelism needs an nn.Linear with vocab_size outputs there"
        yield why, "make the nn.Linear that computes the logits the last module of head"


def _divided_between_regions(trial: ModelTrial, shares: Shares) -> Any:
    """Return the logits if each rank has only its own positions outside regions."""
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


def _require_unchanged_logits(trial: ModelTrial) -> Iterator[Problem]:
    """Report a model that changes the logits after its head, which returns only this rank's shard of them."""
    logits: list[Any] = []

    def keep(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        logits.append(forward(*arguments, **keywords))
        return logits[-1]

    returned = trial.run(trial.tokens, around={trial.layout.head[-1]: keep})
    if not trial.same(returned, logits[-1]):
        why = f"the model's forward changes the logits that {trial.layout.head[-1]!r} returns, which are sharded over ranks"
        yield trial.problem(why, "set parallelism.disable_loss_parallel = true, or return them unchanged")


def check_context(model: nn.Module, trial: ModelTrial, context: TrainingContext[ContextParallelKeys]) -> Iterator[Problem]:
    """Report a model that mixes positions outside mixers: only mixers see positions of other ranks."""
    length = trial.seq // (2 * _RANKS) * 2 * _RANKS
    if length != trial.seq:
        why = f"the model accepts at most {trial.seq} tokens, too few to divide"
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
        joined = (shares.join(argument, dim) if _is_share(argument, dim) else argument for argument in arguments)
        return shares.split(forward(*joined, **keywords), dim)

    def _is_share(argument: Any, dim: int) -> bool:
        return isinstance(argument, Tensor) and argument.dim() > dim and argument.shape[dim] * _RANKS == trial.seq

    mixers = {call.name: trial.layout.mixer(call.name) for call in trial.calls}
    around: dict[str, Around] = {
        name: partial(whole, mixer.sequence_dim) for name, mixer in mixers.items() if mixer is not None
    }

    def divided() -> Any:
        logits = trial.run(shares.split(trial.tokens), shares.split(trial.positions), around=around)
        return shares.join(logits)

    place = trial.fault(divided, shares)
    if place is not None:
        why = f"{place} depends on other positions but is not in mixers, or ignores the positions that it receives"
        fix = "name every module that mixes positions in mixers, or set parallelism.context_parallel_degree = 1"
        yield trial.problem(why, fix)


def _ignores_positions(trial: ModelTrial, place: str, division: str) -> Problem:
    why = f"{division} passes positions to the model, and with positions 0 .. seq - 1 the output of {place} differs"
    return trial.problem(why, "read positions from the argument positions, and make 0 .. seq - 1 its default")
