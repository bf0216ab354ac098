"""Checks what a position's logits depend on: its own token and those before it, in its document, and nothing else.

Trials (:mod:`titan_core.model.trial`) change everything else, and compare the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan_core.api import Problem
from titan_core.api.config.sections import DataSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.draws import Draws
from titan_core.model.randomness import OTHER_SEED, depends_on_draws, randomness
from titan_core.model.trial import SmallModelTrial


def check_draws_and_order(trial: SmallModelTrial, job: AssembledJob) -> Iterator[Problem]:
    """Yield a problem if logits depend on random draws other than those of the model's streams, or on later tokens; in
    training mode. One more forward pass finds either."""
    earlier = (slice(0, trial.seq - 1), slice(0, max(1, trial.seq // 2 - 1)))
    later = _changed(trial, [slice(one.stop, None) for one in earlier])
    with trial.streams():
        expected, draws = trial.in_training()
        found = trial.run(later, draws=Draws(other=True), seed=OTHER_SEED)
        unchanged = all(torch.equal(expected[row, own], found[row, own]) for row, own in enumerate(earlier))
        if (not unchanged or draws.in_python or draws.unknown) and depends_on_draws(trial, expected, draws):
            yield randomness(trial, job)
            return
        passes: list[tuple[Any, ...]] = [()] if not unchanged else []
        if job.config.section(DataSection).document_mask and trial.layout.masks_documents:
            passes.append(_two_documents(trial, trial.seq // 2 - 1))
        for more in passes:
            run, other = (partial(trial.run, tokens, *more) for tokens in (trial.tokens, later))
            place = trial.difference(run, other, earlier)
            if place is not None:
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
