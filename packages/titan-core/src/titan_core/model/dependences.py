"""Checks what a position's logits depend on: its own token and those before it, in its document, and nothing else.

Trials (:mod:`titan_core.model.trial`) change everything else, and compare the logits. Random draws other than those of the
model's streams (:class:`~titan_core.api.RandomStream`) would differ between meshes, so no logits may depend on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan_core.api import ModelDefinition, Problem, UserError
from titan_core.api.config.sections import DataSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.draws import Draws
from titan_core.model.trial import CannotTry, SmallModelTrial, equal_but_rounding

_OTHER_SEED = 7
"""Seed of the generators in a pass whose other draws must have no effect."""
_SEEDS = (139, 526, 1146, 1989, *range(20))
"""Further seeds, for a model that draws from Python's generator or numpy's. After each of the first four, the first number
of one of the two is next to 0 or 1."""
_MOST_SHOWN = 4

_Draws = Counter[tuple[str, str]]


def check_draws_and_order(trial: SmallModelTrial, job: AssembledJob) -> Iterator[Problem]:
    """Yield a problem if logits depend on random draws other than those of the model's streams, or on later tokens; in
    training mode. One more forward pass finds either."""
    earlier = (slice(0, trial.seq - 1), slice(0, max(1, trial.seq // 2 - 1)))
    later = _changed(trial, [slice(one.stop, None) for one in earlier])
    with trial.streams():
        expected, draws = trial.in_training()
        found = trial.run(later, draws=Draws(other=True), seed=_OTHER_SEED)
        unchanged = all(torch.equal(expected[row, own], found[row, own]) for row, own in enumerate(earlier))
        if (not unchanged or draws.in_python or draws.unknown) and _depends_on_draws(trial, expected, draws):
            yield _randomness(trial, job)
            return
        passes: list[tuple[Any, ...]] = [()] if not unchanged else []
        if job.config.section(DataSection).document_mask and trial.layout.masks_documents:
            passes.append(_two_documents(trial, trial.seq // 2 - 1))
        for more in passes:
            run, other = (partial(trial.run, tokens, *more) for tokens in (trial.tokens, later))
            place = trial.difference(run, other, earlier)
            if place is not None:
                of_first = _changed(trial, [slice(earlier[0].stop, None)])
                run_other = partial(trial.run, of_first, *more)
                mixing = trial.difference(run, run_other, (slice(0, 0), *[slice(None)] * (len(earlier) - 1)))
                if mixing is not None:
                    why = f"{mixing} depends on other sequences of the batch"
                    yield trial.problem(why, "compute each sequence separately (no statistic over the batch)")
                    return
                why = f"{place} depends on later tokens, so the model sees the token that it is to predict"
                fix = "compute each position from itself and those before it (a causal mask, no statistic over a sequence)"
                yield trial.problem(why, f"{fix}, or choose a causal decoder")
                return


def _changed(trial: SmallModelTrial, positions: Sequence[slice]) -> Tensor:
    """Return the trial's tokens with others at ``positions`` of each sequence."""
    tokens = trial.tokens.clone()
    for row, own in enumerate(positions):
        tokens[row, own] = (tokens[row, own] + 1) % trial.layout.vocab_size
    return tokens


def _two_documents(trial: SmallModelTrial, cut: int) -> tuple[Tensor, Tensor]:
    """Return positions and documents of sequences whose second document begins at ``cut``."""
    positions = torch.cat((trial.positions[:, :cut], trial.positions[:, : trial.seq - cut]), dim=1)
    return positions, (trial.positions >= cut).long()


def check_batches(trial: SmallModelTrial, job: AssembledJob) -> Iterator[Problem]:
    """Yield a problem if a sequence (or a document, if documents are masked) depends on the rest of the batch."""
    if job.batch.ranks * job.batch.microbatches > 1 or job.mesh.world_size > 1:
        for number in range(len(trial.tokens)):
            place = trial.fault(partial(trial.run, trial.tokens[number : number + 1]), sequence=number)
            if place is not None:
                why = f"{place} mixes the sequences of a batch, so results would depend on the division of the global batch"
                yield trial.problem(why, "compute each sequence separately, or train on one rank with one microbatch")
                return
    if job.config.section(DataSection).document_mask:
        yield from _documents(trial)


def _documents(trial: SmallModelTrial) -> Iterator[Problem]:
    """Yield a problem if two documents in one sequence give other logits than each gives alone."""
    place = trial.positions_fault()
    if place is not None:
        yield trial.problem(f"{place} gives other results if positions 0 .. seq - 1 are passed explicitly", "use positions")
        return
    cut = trial.seq // 2 - 1
    positions, documents = _two_documents(trial, cut)
    why = "masks_documents is true, but two documents in one sequence give other logits than each gives alone"
    fix = "pass documents to every mixer, use the positions argument, or set masks_documents = False"
    try:
        packed = trial.run(trial.tokens, positions, documents)
        alone = torch.cat([trial.run(tokens) for tokens in (trial.tokens[:, :cut], trial.tokens[:, cut:])], dim=1)
        same = trial.same(packed, alone)
    except Exception as error:  # noqa: BLE001 - the model's code may raise anything
        yield trial.problem(f"{why}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", fix)
        return
    if not same:
        second = [slice(cut, None)] * len(trial.tokens)
        other = _changed(trial, [slice(0, cut)] * len(trial.tokens))
        run, with_other = (partial(trial.run, tokens, positions, documents) for tokens in (trial.tokens, other))
        place = trial.difference(run, with_other, second)
        if place is not None:
            why = f"{why}: in the second one, {place} depends on tokens of the first"
        yield trial.problem(why, fix)


def _depends_on_draws(trial: SmallModelTrial, expected: Tensor, draws: Draws) -> bool:
    """Return whether other draws change the logits ``expected``.

    Args:
        draws: those with which they were computed.
    """
    if draws.unknown:
        return True
    other = Draws(other=True)
    again = trial.run(trial.tokens, draws=other, seed=_OTHER_SEED)
    drew = draws.operators or draws.in_python or other.operators
    exactly = torch.allclose(expected, again, rtol=0.0, atol=0.0, equal_nan=True)
    if not exactly and (drew or not equal_but_rounding(expected, again)):
        return True
    return draws.in_python and any(not torch.equal(trial.run(trial.tokens, seed=seed), expected) for seed in _SEEDS)


def _randomness(trial: SmallModelTrial, job: AssembledJob) -> Problem:
    """Return the problem of a model whose logits depend on random draws: which modules draw, and the keys that let them."""
    with trial.streams():
        drawn = trial.drawing()
    shown = [f"{name!r} ({operator})" if name else operator for name, operator in drawn]
    if len(shown) > _MOST_SHOWN:
        shown[_MOST_SHOWN:] = [f"{len(shown) - _MOST_SHOWN} more"]
    where = ", ".join(shown) or "two calls with the same tokens differ"
    why = f"its logits in training depend on random numbers that would differ between meshes: {where}"
    keys = _keys(job, drawn, trial.tokens.device)
    own = "draw with titan_core.api.Dropout or a RandomStream, whose numbers no mesh changes"
    settings = ", ".join(f"{key} = {str(_zero(value)).lower()} (it is {str(value).lower()})" for key, value in keys.items())
    fix = f"set {settings}; or {own}" if keys else own
    return Problem(f"model {job.model_name!r}", why, fix)


def _keys(job: AssembledJob, drawn: _Draws, device: torch.device) -> dict[str, Any]:
    """Return the model's arguments that let it draw, and their values: without one, some draws are not made, or none has an
    effect, while evaluations are as before."""
    values = job.model_args.model_dump()
    evaluated = _drawn(job, values, device)
    if evaluated is None or evaluated[0] != drawn:
        return {}  # it is not what the model's plugin builds from its arguments
    left, still = drawn, evaluated[1]
    found: dict[str, Any] = {}
    candidates = dict(_leaves(values, ()))
    while left:
        keys = []
        for path in candidates:
            other = _drawn(job, _without(values, path), device)
            if other is None:
                continue
            unmade = left - other[0] if other[0] else None
            if unmade or (unmade is None and other[1].shape == still.shape and equal_but_rounding(other[1], still)):
                keys.append(path)
        for path in keys:
            found[".".join(("model.args", *path))] = candidates.pop(path)
            values = _without(values, path)
        without = _drawn(job, values, device) if keys else None
        if without is None:
            break
        left, still = without
    return found


def _drawn(job: AssembledJob, values: Mapping[str, Any], device: torch.device) -> tuple[_Draws, Tensor] | None:
    """Return the draws in the model of these arguments, none if they have no effect, and its logits in evaluation; ``None``:
    there is no such model."""
    try:
        definition: ModelDefinition = job.family.define.call(ModelDefinition, type(job.model_args).model_validate(values))
        with torch.device("meta"):
            model: Any = definition.build()
        trial = SmallModelTrial(model, definition.layout, job.model_name, device, extras=job.data.extras)
    except (UserError, ValueError, CannotTry):
        return None
    with trial.streams():
        expected, draws = trial.in_training()
        drawn = trial.drawing() if _depends_on_draws(trial, expected, draws) else Counter()
    with trial.evaluating():
        return drawn, trial.logits


def _leaves(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of each switch that is on, and of each number with a fraction that is not 0."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        elif value is True or (isinstance(value, float) and value):
            yield (*path, key), value


def _without(values: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    first, *rest = path
    return {**values, first: _without(values[first], tuple(rest)) if rest else _zero(values[first])}


def _zero(value: Any) -> Any:
    return False if value is True else 0.0
