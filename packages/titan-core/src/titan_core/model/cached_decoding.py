"""Checks that a model whose mixers keep what generation needs gives the same logits token by token as for a whole sequence.

Generation computes each position once, if every mixer takes part in a :class:`~titan_core.api.Decoding`. A mixer that loses
a part of its state, or code outside mixers that reads earlier positions, would then generate other tokens, without an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan_core.api import Decoding, Problem
from titan_core.model.trial import SmallModelTrial

_ALONE = 2
"""Number of positions that are computed one by one, after some that are computed together."""

_Calls = list[tuple[str, Tensor | None, Tensor | None]]
"""Name, input and output of each call of a mixer."""


def check_decoding(trial: SmallModelTrial) -> Iterator[Problem]:
    """Yield a problem if the logits of ``trial``, which is in evaluation mode, differ from those of cached positions."""
    names = [name for name in dict.fromkeys(call.name for call in trial.calls) if trial.layout.mixer(name) is not None]
    cuts = [0, trial.seq // 4, *range(trial.seq - _ALONE, trial.seq + 1)]
    pieces = [slice(first, last) for first, last in itertools.pairwise(cuts)]
    decoding = Decoding(len(trial.tokens), trial.seq)
    for piece in pieces:
        found: _Calls = []
        try:
            with decoding.computing(trial.positions[:, piece], piece.stop):
                logits = trial.run(trial.tokens[:, piece], trial.positions[:, piece], around=_recording(names, found))
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            if decoding.mixers:
                yield _problem(trial, f"positions {piece.start} to {piece.stop - 1} alone raise {error!r:.200}")
            return
        if decoding.mixers != {trial.module(name) for name in names}:
            return  # generation computes the whole sequence for each token
        if not trial.same(logits, trial.logits[:, piece]):
            whole: _Calls = []
            trial.run(trial.tokens, trial.positions, around=_recording(names, whole))
            yield _problem(trial, _place(whole, found, piece))
            return


def _recording(names: list[str], calls: _Calls) -> dict[str, Callable[..., Any]]:
    def record(name: str, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        given = next((one.clone() for one in arguments if isinstance(one, Tensor)), None)
        result = forward(*arguments, **keywords)
        calls.append((name, given, result.clone() if isinstance(result, Tensor) else None))
        return result

    return {name: partial(record, name) for name in names}


def _place(whole: _Calls, found: _Calls, piece: slice) -> str:
    for (name, *expected), (_, *computed) in zip(whole, found, strict=False):
        given, result = (
            one is None or other is None or _equal(one, other, piece) for one, other in zip(expected, computed, strict=True)
        )
        if not given:
            return f"the code before mixer {name!r} reads earlier positions"
        if not result:
            return f"mixer {name!r} returns something else"
    return "the code after the last mixer reads earlier positions"


def _equal(whole: Tensor, found: Tensor, piece: slice) -> bool:
    different = [dim for dim in range(whole.dim()) if whole.shape[dim] != found.shape[dim]]
    if whole.dim() != found.dim() or len(different) != 1:
        return True  # not comparable
    expected = whole.narrow(different[0], piece.start, piece.stop - piece.start)
    return expected.shape != found.shape or torch.allclose(expected, found, rtol=0.0, atol=1e-4 * float(whole.abs().max()))


def _problem(trial: SmallModelTrial, why: str) -> Problem:
    return trial.problem(
        "its mixers keep what generation needs of earlier positions, but tokens generated one by one have other logits than "
        f"in a whole sequence: {why}",
        "keep all that a position leaves in current_decoding().state(self), or name the module that reads earlier positions "
        "(a convolution, a token shift) in mixers, with a kind of its own: each token then computes the whole sequence",
    )
