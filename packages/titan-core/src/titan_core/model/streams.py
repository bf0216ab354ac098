"""Setup and checks of modules that draw random numbers (:mod:`titan_core.api.model.random_streams`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_core.api import Batch, ModelTrial, Problem, RandomStream
from titan_core.api.parallel.microbatch import Microbatch, microbatch_scope
from titan_core.model.stand_in import first_alike


def begin_streams(model: nn.Module, device: torch.device) -> None:
    """Give each :class:`RandomStream` its name in the whole model; ``model`` may be a part, which keeps the names."""
    for name, module in model.named_modules():
        if isinstance(module, RandomStream):
            module.begin(name, device)


@contextmanager
def streams_begun(model: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Let each :class:`RandomStream` of ``model`` draw for a microbatch of ``tokens`` within the block."""
    before = [(module, dict(vars(module))) for module in model.modules() if isinstance(module, RandomStream)]
    begin_streams(model, tokens.device)
    rows = torch.arange(len(tokens), device=tokens.device)
    try:
        with microbatch_scope(Microbatch(Batch(tokens, tokens, rows=rows), step=1, seed=0)):
            yield
    finally:
        for module, attributes in before:
            vars(module).update(attributes)


def check_streams(model: nn.Module, trial: ModelTrial) -> Iterator[Problem]:
    """Check the calls of each :class:`RandomStream` in the trial, and report to it how many features a token has there.

    A module's name determines its draws, so a second call in one forward pass would draw the same numbers again.
    """
    calls = Counter(call.name for call in trial.calls)
    shapes = {call.name: call.arguments[0] for call in trial.calls if call.arguments}
    alike = first_alike(model, trial.layout)
    names: dict[RandomStream, str] = {}
    tried = tuple(trial.tokens.shape)
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, RandomStream):
            continue
        if module in names:
            yield _drawn_twice(f"{names[module]!r} is also {name!r}")
            continue
        names[module] = name
        block = next((path for path in alike if name.startswith(f"{path}.")), None)
        called = name if block is None else alike[block] + name.removeprefix(block)
        shape = shapes.get(called)
        if shape is None:
            continue
        if calls[called] > 1:
            yield _drawn_twice(f"{name!r} is called {calls[called]} times in a forward pass")
        elif not isinstance(shape, tuple) or len(shape) < 3 or shape[:2] != tried:
            why = f"{name!r} must be called with a tensor [batch, seq, features...], but is called with {shape}"
            yield trial.problem(f"{why}; [batch, seq] is {tried}", "move the batch and sequence dimensions to the front")
        else:
            module.expect(torch.Size(shape[2:]).numel())


def _drawn_twice(what: str) -> Problem:
    return Problem("the model", f"{what}, and would draw the same numbers each time", "use a separate module for each call")
